"""Records as JSONL, CSV or Parquet, to a file that is whole or absent, or to a stream."""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

from pipeline.durable import TEMPORARY_SUFFIX, replace_file, sync_directory
from pipeline.journal.lines import as_line, writing
from pipeline.results.parsed import Record, column_of, types_of, with_fields

FORMATS = ("jsonl", "csv", "parquet")
ROW_GROUP = 2000
_FORMULA = ("=", "+", "-", "@", "\t", "\r")

Records = Callable[[], Iterator[Record]]


def write_table(
    records: Records, form: str, output: Path | BinaryIO, *, fields: bool = False
) -> None:
    """Write what `records()` gives; `fields` makes columns of the fields of JSON answers.

    `records` is called twice where columns must be known first. Raises PipelineError for a place
    that can't be written.
    """
    if form == "jsonl":
        lines = (as_line(with_fields(each, None) if fields else each) for each in records())
        _put(lines, output)
        return
    types = types_of(records()) if fields else {}
    made = (with_fields(each, types) if fields else each for each in records())
    if form == "csv":
        _put(_csv_lines(made), output)
    else:
        assert isinstance(output, Path), "Parquet needs a file"
        ours = next(iter(records()), {})
        columns = {column_of(name, ours): kind for name, kind in types.items()}
        _put_parquet(made, columns, output)


def _put(lines: Iterable[bytes], output: Path | BinaryIO) -> None:
    if isinstance(output, Path):
        with writing(output):
            replace_file(output, lines)
    else:
        for line in lines:
            output.write(line)


# ---------------------------------------------------------------- CSV


def _csv_lines(records: Iterable[Record]) -> Iterator[bytes]:
    """With a header; lists and objects as JSON text, flags joined by blanks."""
    names: list[str] | None = None
    for record in records:
        if names is None:
            names = list(record)
            yield _csv_line(names)
        yield _csv_line([_cell(name, record.get(name)) for name in names])


def _csv_line(cells: list[str]) -> bytes:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(cells)
    return text.getvalue().encode("utf-8", "backslashreplace")


def _cell(name: str, value: Any) -> str:
    """A spreadsheet must not take what a page says for a formula."""
    if value is None:
        return ""
    if isinstance(value, bool | int | float):
        return json.dumps(value)
    if name == "flags":
        return " ".join(value)
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return f"'{text}" if text.startswith(_FORMULA) else text


# ---------------------------------------------------------------- Parquet


def _put_parquet(records: Iterable[Record], types: Mapping[str, type], output: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    temporary = output.with_name(f".{output.name}{TEMPORARY_SUFFIX}")
    with writing(output):
        try:
            writer = None
            remaining = iter(records)
            while rows := list(islice(remaining, ROW_GROUP)):
                if writer is None:
                    writer = pq.ParquetWriter(temporary, _schema(rows[0], types))
                columns = {
                    name: [_value(row[name], field) for row in rows]
                    for name, field in zip(writer.schema.names, writer.schema, strict=True)
                }
                writer.write_table(pa.table(columns, schema=writer.schema))
            if writer is None:
                pq.write_table(pa.table({}), temporary)
            else:
                writer.close()
            with temporary.open("rb") as file:
                os.fsync(file)
            os.replace(temporary, output)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        sync_directory(output.parent)


def _schema(record: Record, types: Mapping[str, type]) -> Any:
    import pyarrow as pa

    page = pa.struct([("file", pa.string()), ("page", pa.int64())])
    counts = ("page", "prompt_tokens", "completion_tokens", "attempts")
    known = {name: pa.int64() for name in counts}
    known |= {"choices": pa.list_(pa.string()), "flags": pa.list_(pa.string())}
    known["pages"] = pa.list_(page) if "custom_id" in record else pa.list_(pa.int64())
    known["missing_pages"] = pa.list_(pa.int64())
    found = {bool: pa.bool_(), int: pa.int64(), float: pa.float64()}
    known |= {name: found.get(kind, pa.string()) for name, kind in types.items()}
    return pa.schema([(name, known.get(name, pa.string())) for name in record])


def _value(value: Any, field: Any) -> Any:
    """A value as its column takes it: what has no type of its own as JSON text."""
    kind = str(field.type)
    if value is None or kind in ("int64", "bool", "double") or kind.startswith("list"):
        return _printable(value)
    return _printable(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))


def _printable(value: Any) -> Any:
    """File names need not be UTF-8; Parquet's strings must."""
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, list):
        return [_printable(each) for each in value]
    if isinstance(value, dict):
        return {name: _printable(each) for name, each in value.items()}
    return value
