"""`make monitoring`."""

from monitoring.files import FOLDER, write

if __name__ == "__main__":
    write(FOLDER)
