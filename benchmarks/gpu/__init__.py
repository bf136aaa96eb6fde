"""The figures of `make bench-gpu`, a file each; every one runs in a process of its own."""
