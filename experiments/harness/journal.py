"""Rows that are on disk as soon as they are measured: a long run goes on where it ended."""

import csv
import time

from experiments.harness.errors import BadInput


class Journal:
    """A CSV file that grows by a row at a time.

    Parameters
    ----------
    path : pathlib.Path
    keys : tuple of str
        Columns that tell one row from another.
    resume : bool
        Keep what the file holds; without it the file begins anew.
    minutes : float, optional
        Time after which `is_late`.
    columns : iterable of str
        Others that every row will have: a file without them is refused before anything is measured.
    """

    def __init__(self, path, keys, resume=False, minutes=None, columns=()):
        self._path, self._keys = path, keys
        self._end = None if minutes is None else time.monotonic() + 60 * minutes
        self.rows = _read(path) if resume and path.exists() else []
        missing = [key for row in self.rows[:1] for key in (*keys, *columns) if key not in row]
        if missing:
            raise BadInput(f"--resume: {path} has no column {missing[0]}: take another --out")
        self._done = {self._key(row) for row in self.rows}
        if not self.rows:
            path.unlink(missing_ok=True)

    def __contains__(self, row):
        """Whether there is a row with these keys."""
        return self._key(row) in self._done

    @property
    def is_late(self):
        """Whether the time is over: what is left is for another run."""
        return self._end is not None and time.monotonic() > self._end

    def add(self, row):
        """Write a row, whose columns are those of the others."""
        row = {name: "" if value is None else str(value) for name, value in row.items()}
        if self.rows and list(row) != list(self.rows[0]):
            raise BadInput(f"{self._path} has other columns: take another --out")
        with self._path.open("a", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, fieldnames=list(row))
            if not self.rows:
                writer.writeheader()
            writer.writerow(row)
        self.rows.append(row)
        self._done.add(self._key(row))

    def _key(self, row):
        return tuple(str(row[key]) for key in self._keys)


def _read(path):
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))
