"""The commands that ask a service, or run right here: one file each."""
