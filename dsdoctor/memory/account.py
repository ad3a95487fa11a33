"""What a rank holds, thing by thing, while a step is followed; and the most it held."""

from collections.abc import Mapping

from dsdoctor.memory.models import Moment, Place, Point, Row


class Account:
    """Bytes by thing and place. ``together``: what is on the host counts as on the device, for there is one memory."""

    def __init__(self, *, together: bool) -> None:
        self.together = together
        self.held: dict[tuple[str, Place], int] = {}
        self.device = self.host = 0
        self._best: Mapping[tuple[str, Place], int] = {}
        self._most = self._most_host = -1

    def add(self, what: str, size: int, place: Place = "device") -> None:
        """Hold so much more of a thing, or less."""
        if not size:
            return
        place = "device" if self.together else place
        self.held[what, place] = self.held.get((what, place), 0) + size
        if place == "device":
            self.device += size
        else:
            self.host += size
        if size > 0:
            self._look()

    def hold(self, what: str, size: int, place: Place = "device") -> None:
        """Hold just so much of a thing."""
        kept: Place = "device" if self.together else place
        self.add(what, size - self.held.get((what, kept), 0), place)

    def passing(self, what: str, size: int, place: Place = "device") -> None:
        """Hold so much more for a moment."""
        self.add(what, size, place)
        self.add(what, -size, place)

    def begin(self) -> None:
        """From here on the most is sought."""
        self._most = self._most_host = -1
        self._look()

    def moment(self, point: Point) -> Moment:
        """The most since ``begin``."""
        rows = tuple(
            Row(what=what, place=place, size=size)
            for (what, place), size in sorted(self._best.items(), key=lambda item: -item[1])
            if size
        )
        return Moment(point=point, device=self._most, host=self._most_host, rows=rows)

    def _look(self) -> None:
        self._most_host = max(self._most_host, self.host)
        if self.device > self._most:
            self._most, self._best = self.device, dict(self.held)
