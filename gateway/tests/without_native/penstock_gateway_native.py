"""What a process finds that has this folder in its PYTHONPATH: nothing. So tests run programs as where the package is not
installed."""

raise ModuleNotFoundError(f"No module named {__name__!r}", name=__name__)
