# SPDX-License-Identifier: Apache-2.0
"""What a reader declares: the files of a dataset, where they lie below the data root, how to read them."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from fedloom.core.errors import DataError
from fedloom.data.arrays import Arrays


@dataclass(frozen=True)
class File:
    """One file that a reader wants, and where it is published."""

    path: str  # below the data root
    url: str
    md5: str  # of what the address gives
    archive: str = ""  # below the data root, where the address gives an archive with this file in it
    also: str = ""  # another place below the data root where the file may lie
    optional: bool = False

    def at(self, root: Path) -> Path:
        """Where the file lies, or else where it belongs; a .gz may also lie there unpacked."""
        places = [self.path, self.path.removesuffix(".gz"), self.also]
        return next((root / place for place in places if place and (root / place).is_file()), root / self.path)


@dataclass(frozen=True)
class Dataset:
    """A published dataset; one without files is part of an installed package."""

    name: str
    about: str
    licence: str
    files: tuple[File, ...]
    read: Callable[[Path], Arrays]

    def missing(self, root: Path) -> list[str]:
        """The files that the reader cannot do without and that are not below the root."""
        return [file.path for file in self.files if not file.optional and not file.at(root).is_file()]

    def load(self, root: Path) -> Arrays:
        """The dataset, read from the files below the root."""
        missing = self.missing(root)
        if missing:
            raise DataError(
                f"Dataset {self.name!r} is not complete below {root}: put {', '.join(missing)} there, "
                f"or run `fedloom data fetch {self.name} --data-root {root}`."
            )
        return self.read(root)
