"""What a run has answered, in the order of its job, as JSONL, CSV or Parquet."""

from pipeline.results.documents import DocumentRow, document_rows
from pipeline.results.rows import Row, RunResults, open_results
from pipeline.results.tables import FORMATS, write_table

__all__ = [
    "FORMATS",
    "DocumentRow",
    "Row",
    "RunResults",
    "document_rows",
    "open_results",
    "write_table",
]
