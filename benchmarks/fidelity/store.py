"""Results as rows of a CSV file, each with the configuration that made it; what is there is not computed again."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

from hot_hf import HOTConfig


class Store:
    """Rows of one CSV file, found again by their key columns."""

    def __init__(self, path: Path, key: tuple[str, ...], values: tuple[str, ...]) -> None:
        self.path, self.key, self.columns = path, key, (*key, *values)
        self.rows: list[dict[str, str]] = []
        if path.is_file():
            with path.open(newline="") as file:
                self.rows = list(csv.DictReader(file))

    def find(self, **key: Any) -> dict[str, str] | None:
        """The finished row with this key, if any."""
        wanted = {name: str(value) for name, value in key.items()}
        return next((row for row in self.rows if all(row[n] == v for n, v in wanted.items())), None)

    def add(self, **row: Any) -> None:
        """Append a row and write the file: an interrupted harness loses the unfinished row only."""
        self.rows.append({name: str(row[name]) for name in self.columns})
        self.path.parent.mkdir(parents=True, exist_ok=True)
        partial = self.path.with_suffix(".partial")
        with partial.open("w", newline="") as file:
            writer = csv.DictWriter(file, self.columns, lineterminator="\n")
            writer.writeheader()
            writer.writerows(self.rows)
        partial.replace(self.path)


# Fields of HOTConfig that decide what is kept and not what is computed: what runs were made with "inputs" still holds.
NOT_ARITHMETIC = ("compress", "chunked_loss", "memory")


def settings_of(config: HOTConfig | dict[str, Any] | None) -> dict[str, Any] | None:
    """What decides the arithmetic of a run, with the fields that HOTConfig has gained since it was stored."""
    if config is None:
        return None
    settings = (config if isinstance(config, HOTConfig) else HOTConfig.from_dict(config)).to_dict()
    return {name: value for name, value in settings.items() if name not in NOT_ARITHMETIC}


def key_of(settings: Any) -> str:
    """A configuration as one stable line of JSON."""
    return json.dumps(settings, sort_keys=True)
