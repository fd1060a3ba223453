"""Read columns of Parquet files from untrusted sources."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from clustergym.common.extras import require
from clustergym.traces.arrays import MAX_RATIO, SMALL_BYTES


def columns_of(path: Path) -> list[str]:
    """Names of the top-level columns."""
    parquet = require("pyarrow.parquet", "engines")
    try:
        return [str(name) for name in parquet.ParquetFile(path).schema_arrow.names]
    except _errors() as error:
        raise _refused(path, error) from error


def open_parquet(path: Path, columns: Sequence[str], rows: int) -> Iterator[dict[str, npt.NDArray[Any]]]:
    """Batches of at most ``rows`` rows. A column of lists of equal length becomes a 2-D array."""
    parquet = require("pyarrow.parquet", "engines")
    try:
        file = parquet.ParquetFile(path)
        names = file.schema_arrow.names
        missing = [name for name in columns if name not in names]
        if missing:
            raise ValueError(f"no column {missing[0]!r}, found {', '.join(map(str, names[:12]))}")
        _check_size(file, path)
        for batch in file.iter_batches(batch_size=rows, columns=list(columns)):
            yield {name: _array(batch.column(name), name) for name in columns}
    except _errors() as error:
        raise _refused(path, error) from error


def _errors() -> tuple[type[Exception], ...]:
    """What a broken file can make pyarrow raise."""
    return (require("pyarrow", "engines").ArrowException, OSError, ValueError)


def _refused(path: Path, error: Exception) -> ValueError:
    text = str(error).split("\n")[0][:200]
    return ValueError(f"{path}: not a readable Parquet file: {text}")


def _check_size(file: Any, path: Path) -> None:
    """Refuse a file that would unpack to far more than its size."""
    groups = (file.metadata.row_group(i) for i in range(file.metadata.num_row_groups))
    total, packed = sum(max(group.total_byte_size, 0) for group in groups), path.stat().st_size
    if total > SMALL_BYTES and total > MAX_RATIO * packed:
        raise ValueError(f"{packed} bytes would unpack to {total}, more than {MAX_RATIO} times as many")


def _array(column: Any, name: str) -> npt.NDArray[Any]:
    if column.null_count:
        raise ValueError(f"column {name!r} has missing values")
    kind = str(column.type)
    if not kind.startswith(("list", "fixed_size_list", "large_list")):
        return np.asarray(column.to_numpy(zero_copy_only=False))
    values = column.flatten()
    if values.null_count:
        raise ValueError(f"column {name!r} has missing values")
    flat = np.asarray(values.to_numpy(zero_copy_only=False))
    if not len(column):
        return np.empty((0, 0), flat.dtype)
    lengths = np.unique(np.asarray(column.value_lengths().to_numpy(zero_copy_only=False)))
    if len(lengths) > 1:
        raise ValueError(f"column {name!r} has lists of {lengths.min()} to {lengths.max()} values: expected one length")
    return flat.reshape(len(column), -1)
