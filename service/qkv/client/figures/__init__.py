"""Figures of attention, drawn by matplotlib.

Functions import these modules when they draw: the extra `plot` installs matplotlib. Text in PDF and
PS files is TrueType, unless the program sets another type after the first figure.
"""

try:
    import matplotlib as mpl
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "a figure needs matplotlib: run `pip install '.[plot]'` in a clone of qkv", name=error.name
    ) from None

mpl.rcParams["pdf.fonttype"] = mpl.rcParams["ps.fonttype"] = 42
