"""The tables of the service, in SQLite or PostgreSQL, and transactions on them that survive kill -9."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compile_stage.core.errors import StorageError
from compile_stage.core.redaction import redacted

if TYPE_CHECKING:
    from sqlalchemy import Connection, Engine, MetaData, Table

_BUSY_S = 30  # a writer waits so long for another; each holds the database for milliseconds


@cache
def tables() -> MetaData:
    """`deliveries`: ids that were taken. `refusals`: the last that were not. `counts`: for the metrics. `looks`:
    versions to look at. `jobs`: what is to be run, each kind of work on each version once. `attempts`: how each start
    of a job ended. `known`: versions that were there before the first start; `idle`: those of them that had neither an
    alias nor an approval."""
    from sqlalchemy import Column, Float, Integer, MetaData, String, Table, Text, UniqueConstraint

    metadata = MetaData()
    Table(
        "deliveries", metadata,
        Column("id", String(128), primary_key=True), Column("received_at", Float, nullable=False, index=True),
    )  # fmt: skip
    Table(
        "refusals", metadata,
        Column("id", Integer, primary_key=True), Column("at", Float), Column("reason", String(32)),
        Column("problem", Text), Column("peer", String(64)),
    )  # fmt: skip
    Table("counts", metadata, Column("label", String(32), primary_key=True), Column("value", Integer, nullable=False))
    Table(
        "looks", metadata,
        Column("id", Integer, primary_key=True), Column("name", String(256)), Column("version", String(20)),
        Column("alias", String(256)), Column("event", String(64)), Column("attempts", Integer),
        Column("not_before", Float), Column("problem", Text),
    )  # fmt: skip
    Table(
        "jobs", metadata,
        Column("id", Integer, primary_key=True), Column("kind", String(16)), Column("name", String(256)),
        Column("version", String(20)), Column("subject", String(600)), Column("state", String(16), index=True),
        Column("attempt", Integer), Column("tries", Integer),
        Column("not_before", Float), Column("queued_at", Float), Column("ended_at", Float),
        Column("exit_code", Integer), Column("problem", Text), Column("owner", String(600)), Column("beat_at", Float),
        UniqueConstraint("kind", "name", "version", "subject"),
    )  # fmt: skip
    Table(
        "attempts", metadata,
        Column("job", Integer, primary_key=True), Column("attempt", Integer, primary_key=True),
        Column("kind", String(16)), Column("exit_code", Integer), Column("seconds", Float), Column("ended_at", Float),
    )  # fmt: skip
    for name in ("known", "idle"):
        Table(
            name,
            metadata,
            Column("name", String(256), primary_key=True),
            Column("version", String(20), primary_key=True),
        )
    return metadata


def table(name: str) -> Table:
    """One of `tables`."""
    return tables().tables[name]


class Store:
    """A database of the service.

    Raises:
        StorageError: It can't be opened.
    """

    def __init__(self, url: str) -> None:
        self._engine = _engine(url)

    @contextmanager
    def transaction(self) -> Iterator[Connection]:
        """All of it, or nothing; on the disk when the context ends."""
        with self._engine.begin() as connection:
            yield connection

    def close(self) -> None:
        """Give the connections up."""
        self._engine.dispose()


def insert_once(connection: Connection, into: str, /, **values: Any) -> bool:
    """Insert a row unless one with its key is there; True if it was inserted."""
    if connection.dialect.name == "postgresql":
        from sqlalchemy.dialects.postgresql import insert
    else:
        from sqlalchemy.dialects.sqlite import insert  # type: ignore[assignment]
    return connection.execute(insert(table(into)).values(**values).on_conflict_do_nothing()).rowcount == 1


def _engine(url: str) -> Engine:
    from sqlalchemy import create_engine, event
    from sqlalchemy.exc import SQLAlchemyError

    try:
        if url.startswith("sqlite:///"):
            Path(url.removeprefix("sqlite:///")).parent.mkdir(parents=True, exist_ok=True)
            engine = create_engine(url, connect_args={"timeout": _BUSY_S})
            event.listen(engine, "connect", _set_up_sqlite)
            event.listen(engine, "begin", lambda connection: connection.exec_driver_sql("BEGIN IMMEDIATE"))
        else:
            engine = create_engine(url, pool_pre_ping=True)
        tables().create_all(engine)
    except (SQLAlchemyError, ImportError, OSError) as error:
        raise StorageError(f"the queue's database can't be opened: {redacted(str(error))}") from error
    return engine


def _set_up_sqlite(connection: Any, _: object) -> None:
    connection.isolation_level = None  # transactions begin where SQLAlchemy says, and take the write lock at once
    connection.execute("PRAGMA journal_mode=WAL")
    connection.execute("PRAGMA synchronous=FULL")  # what was answered with 202 survives a power failure too
