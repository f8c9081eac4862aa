"""What happens to files at rest."""

from __future__ import annotations

import os
import random
from pathlib import Path


def flip(file: Path, rng: random.Random) -> None:
    """A bit."""
    data = bytearray(file.read_bytes())
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    file.write_bytes(data)


def cut(file: Path, rng: random.Random) -> None:
    os.truncate(file, rng.randrange(file.stat().st_size))


def delete(file: Path, rng: random.Random) -> None:
    file.unlink()


DAMAGE = {"flipped": flip, "cut": cut, "deleted": delete}
