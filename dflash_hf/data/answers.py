"""The file that `dflash-hf regenerate` writes: one answer a line, killed and continued at any moment."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ..errors import DatasetError


def digest_of(items: Iterable[Any]) -> str:
    """SHA-256 over the JSON of every item, in order."""
    digest = hashlib.sha256()
    for item in items:
        digest.update(json.dumps(item, sort_keys=True).encode() + b"\n")
    return digest.hexdigest()


class AnswerFile:
    """Appends answers to a JSONL file and knows which are there.

    The settings lie beside it in `NAME.settings.json`. A last line without an end, which a killed run leaves, is cut
    off when the file is opened.

    Args:
        path: the JSONL file.
        settings: what the answers depend on. A file that was begun with others is refused.

    Raises:
        DatasetError: for other settings, or a file whose settings are not known.
    """

    def __init__(self, path: str | os.PathLike, settings: dict[str, Any]):
        self.path = Path(path)
        self._check_settings(json.loads(json.dumps(settings)))
        self._places: dict[int, dict[int, int]] = {}
        self.rows = 0
        self.path.touch()
        self._file = self.path.open("r+b")
        self._read()

    def _check_settings(self, settings: dict[str, Any]) -> None:
        beside = self.path.with_name(self.path.name + ".settings.json")
        if beside.exists():
            found = json.loads(beside.read_text(encoding="utf-8"))
            for key in sorted(found | settings):
                if found.get(key) != settings.get(key):
                    raise DatasetError(
                        f"{self.path} was begun with {key} {found.get(key)!r}, but this run has "
                        f"{settings.get(key)!r}. Repeat the first setting to go on, or name another file."
                    )
            return
        if self.path.exists() and self.path.stat().st_size:
            raise DatasetError(
                f"{self.path} exists, but {beside.name} beside it does not, so nothing says how its lines were made. "
                "Name another file."
            )
        self.path.parent.mkdir(parents=True, exist_ok=True)
        temporary = beside.with_name(beside.name + ".tmp")
        temporary.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
        os.replace(temporary, beside)

    def _read(self) -> None:
        end = 0
        for line in self._file:
            if not line.endswith(b"\n"):
                break
            row = json.loads(line)
            self._places.setdefault(row["index"], {})[row["turn"]] = end
            self.rows += 1
            end += len(line)
        self._file.seek(end)
        self._file.truncate()

    def turns_of(self, index: int) -> int:
        """How many answers of a conversation are there."""
        return len(self._places.get(index, ()))

    def answer(self, index: int, turn: int) -> dict[str, Any]:
        """An answer that is there."""
        self._file.seek(self._places[index][turn])
        row = json.loads(self._file.readline())
        self._file.seek(0, os.SEEK_END)
        return row

    def append(self, row: dict[str, Any]) -> None:
        """Write an answer; a killed process loses none that was written before."""
        place = self._file.tell()
        self._file.write(json.dumps(row, ensure_ascii=False).encode() + b"\n")
        self._file.flush()
        self._places.setdefault(row["index"], {})[row["turn"]] = place
        self.rows += 1

    def close(self) -> None:
        """Close the file, its content safe on the disk."""
        os.fsync(self._file.fileno())
        self._file.close()

    def __enter__(self) -> AnswerFile:
        return self

    def __exit__(self, *exc_info) -> None:
        self.close()
