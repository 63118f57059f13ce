"""qkv on Ray Serve: `serve run qkv.server.ray_serve:app` starts it."""

from qkv.server.ray_serve.deployment import Replica, app

__all__ = ["Replica", "app"]
