"""Stop strings: found across the borders of tokens and chunks, and unless asked for never shown, not even in part."""

from collections.abc import Sequence


class StopBuffer:
    """Holds back as much text as could be the beginning of a stop string.

    Of several matches the one that is complete first counts, the longest of those that end together: so the result does not
    depend on how the text is cut into pieces.

    Args:
        stops: Stop strings, none of them empty; with none, text passes at once.
        include: Whether the one that is found is shown.
    """

    __slots__ = ("_hold", "_include", "_stops", "_tail")

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        self._stops = tuple(stops)
        self._hold = max((len(stop) for stop in stops), default=1) - 1
        self._include = include
        self._tail = ""

    def feed(self, text: str, *, search: bool = True) -> tuple[str, str | None]:
        """Takes new text; returns what may be shown and the stop string that was found, if any. Not to be fed after that.

        Args:
            text: Follows what was fed before.
            search: Whether a stop string that ends in this text counts.
        """
        if not self._stops:
            return text, None
        # A match cannot begin in what was released: as many characters as the longest stop string have been seen from there.
        window, old = self._tail + text, len(self._tail)
        found: list[tuple[int, int, str]] = []
        if search:
            # Matches that end in the old text were found when it came, or do not count.
            found = [(at + len(it), at, it) for it in self._stops if (at := window.find(it, max(old - len(it) + 1, 0))) >= 0]
        if found:
            end, start, stop = min(found)
            self._tail = ""
            return window[: end if self._include else start], stop
        cut = max(len(window) - self._hold, 0)
        self._tail = window[cut:]
        return window[:cut], None

    def flush(self) -> str:
        """The text held back, once it is known that no more comes."""
        tail, self._tail = self._tail, ""
        return tail
