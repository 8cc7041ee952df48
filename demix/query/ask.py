"""One SELECT over the views of runs, in a DuckDB that can neither write nor read anything else.

DuckDB reads Arrow datasets. It requests columns and rows from a dataset; the dataset opens the files that may contain
such rows, and reads them in pieces.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import duckdb
import psutil
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.fs

from demix.errors import DemixError
from demix.files import REMAKE, parquet_reader
from demix.files.database import connected
from demix.query.views import VIEWS, Part, QueryRun, View
from demix.run.run import Run

BATCH_ROWS = 2048
HINT = "fix the query; `demix sql --tables` lists tables and columns"
RESULTS = Path("results")


def named_runs(folders: Sequence[Path]) -> list[QueryRun]:
    """The runs in `folders`; without folders, the only run below results/.

    The column `run` has the folder's name, or the given path if several folders have the same name. Raises DemixError
    for a folder without a run, for a folder that is given twice, and if there is not exactly one run to use.
    """
    if not folders:
        folders = sorted(path.parent for path in RESULTS.glob("*/config.json"))
        if len(folders) != 1:
            found = f"there are several: {', '.join(map(str, folders))}" if folders else f"{RESULTS} holds no run"
            raise DemixError("RUN", f"is missing, and {found}", "name a run's folder, results/<run>")
    places = [folder.resolve() for folder in folders]
    names = [place.name for place in places]
    runs = list[QueryRun]()
    for folder, place in zip(folders, places, strict=True):
        if places.count(place) > 1:
            raise DemixError(folder, "is named twice", "name each run once")
        name = place.name if names.count(place.name) == 1 else str(folder)
        runs.append(QueryRun(name, Run.read(folder)))
    return runs


class _Dataset(ds.Dataset):  # type: ignore[misc]
    """A view of runs with the interface of an Arrow dataset; DuckDB calls its `schema` and `scanner`.

    Errors in reading a file are kept in `failures`, because DuckDB keeps only their text.
    """

    def __init__(self, name: str, view: View, runs: Sequence[QueryRun], failures: list[DemixError]) -> None:
        # No dataset of Arrow's own is behind this one.
        self._name, self._view, self._runs, self._failures = name, view, runs, failures

    @cached_property
    def _parts(self) -> list[Part]:
        return [part for run in self._runs for part in self._view.parts(run)]

    @cached_property
    def schema(self) -> pa.Schema:
        """The columns of the view: `run`, then the columns that the view lists or those of each run's first part."""
        if not self._parts and not self._view.optional:
            raise DemixError(self._runs[0].folder, f"has no {self._name} yet", "run the workflow to its end")
        columns = self._view.types
        if not self._view.columns:
            for path in {part.run.name: part.path for part in reversed(self._parts)}.values():
                with parquet_reader(path) as file:
                    columns |= {field.name: field.type for field in file.schema_arrow if field.name not in columns}
        return pa.schema([("run", pa.string()), *((name, type_) for name, type_ in columns.items())])

    def scanner(self, columns: list[str] | None = None, filter: ds.Expression | None = None) -> Any:
        """The `columns` of the rows that pass `filter`, in the form from which DuckDB reads rows."""
        wanted = self.schema.names if columns is None else columns
        schema = pa.schema([self.schema.field(name) for name in wanted])
        # A filter names no columns by itself, but its text does. More columns than needed do no harm.
        needed = [name for name in self.schema.names if name in wanted or name in str(filter)]
        batches = self._batches(needed, wanted, filter)
        return SimpleNamespace(to_reader=lambda: pa.RecordBatchReader.from_batches(schema, batches))

    def _batches(self, needed: list[str], wanted: list[str], filter: ds.Expression | None) -> Iterator[pa.RecordBatch]:
        for part in self._that_may_pass(filter):
            try:
                for piece in self._view.read(part, needed):
                    table = self._completed(piece, part, needed)
                    table = (table if filter is None else table.filter(filter)).select(wanted)
                    yield from table.to_batches(max_chunksize=BATCH_ROWS)
            except DemixError as error:
                self._failures.append(error)
                raise
            except (pa.ArrowException, KeyError, TypeError, ValueError) as error:
                self._failures.append(DemixError(part.path, f"has content that no stage writes ({error})", REMAKE))
                raise

    def _that_may_pass(self, filter: ds.Expression | None) -> list[Part]:
        """The parts that the constant columns do not exclude, found by Arrow's own pruning; no file is opened."""
        form, nowhere = ds.ParquetFileFormat(), pyarrow.fs.LocalFileSystem()
        fragments = []
        for number, part in enumerate(self._parts):
            same = ds.field("run") == part.run.name
            for name, value in part.same.items():
                same &= ds.field(name) == value
            fragments.append(form.make_fragment(str(number), nowhere, partition_expression=same))
        whole = ds.FileSystemDataset(fragments, self.schema, form, nowhere)
        return [self._parts[int(fragment.path)] for fragment in whole.get_fragments(filter=filter)]

    def _completed(self, piece: pa.Table, part: Part, needed: list[str]) -> pa.Table:
        """The `needed` columns: those read from the file, those constant in the part, and NULL for the others."""
        same = {"run": part.run.name, **part.same}
        names, columns = set(piece.column_names), []
        for name in needed:
            kind = self.schema.field(name).type
            if name in names:
                columns.append(piece[name].cast(kind))
            else:
                columns.append(pa.repeat(pa.scalar(same.get(name), kind), piece.num_rows))
        return pa.table(columns, names=needed)


class Answers:
    """A connection with the views of some runs: a context manager, which closes the connection."""

    def __init__(self, runs: Sequence[QueryRun]) -> None:
        self._failures: list[DemixError] = []
        self._broken: dict[str, DemixError] = {}
        self.tables: dict[str, pa.Schema] = {}
        self._connection = connected(memory=psutil.virtual_memory().available // 2)
        for name, view in VIEWS.items():
            dataset = _Dataset(name, view, runs, self._failures)
            try:
                self.tables[name] = dataset.schema
                self._connection.register(name, dataset)
            except DemixError as error:
                # Other tables can still be queried.
                self._broken[name] = error

    def __enter__(self) -> "Answers":
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()

    def described(self) -> Iterator[tuple[str, str, str]]:
        """Name, content and columns of each table, with an error in place of the columns if a table is broken."""
        for name, view in VIEWS.items():
            fault = self._broken.get(name)
            yield name, view.holds, str(fault) if fault else ", ".join(self.tables[name].names)

    @contextmanager
    def ask(self, query: str) -> Iterator[pa.RecordBatchReader]:
        """Yield the rows that a query selects, read one by one.

        Raises DemixError, also inside the `with` block, for anything other than one SELECT, for an incorrect query, for
        a missing or damaged file, and if memory runs out.
        """
        self._failures.clear()
        try:
            self._check(query)
            yield self._connection.sql(query).to_arrow_reader(BATCH_ROWS)
        except (duckdb.Error, pa.ArrowException, OSError) as error:
            # Errors in reading rows have no errno.
            if getattr(error, "errno", None) is not None:
                raise
            raise (self._failures or [_explained(str(error), self.tables)])[0] from None

    def _check(self, query: str) -> None:
        statements = self._connection.extract_statements(query)
        if not statements:
            raise DemixError("query", "is empty", "write a query such as select * from results")
        if len(statements) > 1:
            raise DemixError("query", f"is {len(statements)} statements", "run one SELECT at a time")
        if statements[0].type != duckdb.StatementType.SELECT:
            kind = statements[0].type.name
            raise DemixError("query", f"is not a SELECT but {kind}", "use one SELECT; queries cannot change files")
        for name in self._connection.get_table_names(query):
            if name in self._broken:
                raise self._broken[name]


def _explained(text: str, tables: Mapping[str, object]) -> DemixError:
    """DuckDB's message of several lines as one error: what is wrong, where, and what can be used instead."""
    message, _, place = text.partition("\n\nLINE ")
    cause, _, more = message.partition(": ")[2].partition("\n")
    if cause.startswith("Table with name") and not any(f'"{name}"' in more for name in tables):
        more = f"The tables are {', '.join(tables)}"
    if message.startswith("Out of Memory"):
        more = "Select fewer columns, fewer rows (where), or sums instead of sorted rows"
    if message.startswith("Permission"):
        more = "A query reads only the tables of the named runs"
    code, _, marks = f"LINE {place}".partition("\n")
    at = code[marks.find("^") :][: min(marks.count("^"), 40)]
    return DemixError(f"query, at {at}" if at else "query", cause.rstrip("!."), more.strip().rstrip(".") or HINT)
