"""Every kind of value comes back from the real server as it went in."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pinlaterd.engines.mysql.connection import (
    EARLIEST_MS,
    LATEST_MS,
    MysqlAddress,
    MysqlConnection,
    among,
    quote_bytes,
    quote_name,
    quote_text,
    quote_time,
    time_number,
)
from pinlaterd.engines.mysql.statements import claims_of
from tests.servers.mariadb import HOST, PASSWD, USER, MariaDB

# What a lexer might trip over: quotes, escapes, ends, and pieces of longer characters before them.
TRAPS = [
    b"'",
    b'"',
    b"\\",
    b"\0",
    b"\x1a",
    b"%",
    b"%s",
    b"`",
    b"--",
    b"/*",
    b"\xc3",
    b"\xbf\\",
    b"\xf0\x9f",
]
bodies = st.one_of(
    st.binary(max_size=200), st.lists(st.sampled_from(TRAPS), max_size=12).map(b"".join)
)
texts = st.one_of(
    st.text(st.characters(exclude_categories=["Cs"]), max_size=100),
    st.text(st.sampled_from("'\"\\%\0\x1a`;-¥₩表é\U0001f986"), max_size=20),
)


@pytest.fixture(scope="module")
def db(mariadb: MariaDB) -> Iterator[MysqlConnection]:
    server = MysqlAddress(HOST, mariadb.port, USER, PASSWD)
    connection = MysqlConnection(server, patience_seconds=30)
    connection.execute(b"CREATE DATABASE literals DEFAULT CHARACTER SET utf8mb4")
    connection.execute(
        b"CREATE TABLE literals.kept"
        b" (body LONGBLOB, text LONGTEXT, at DATETIME(3), at_number DATETIME(3),"
        b" local_id BIGINT UNSIGNED)"
    )
    yield connection
    connection.execute(b"DROP DATABASE literals")
    connection.close()


@given(body=bodies, text=texts, other=texts)
def test_bytes_and_texts_side_by_side(db: MysqlConnection, body: bytes, text: str, other: str):
    statement = b"SELECT %b, %b, %b, HEX(%b)" % (
        quote_text(text),
        quote_bytes(body),
        quote_text(other),
        quote_bytes(body),
    )

    assert db.rows(statement) == ((text, body, other, body.hex().upper()),)


@given(
    rows=st.lists(
        st.tuples(bodies, texts, st.integers(EARLIEST_MS, LATEST_MS), st.integers(0, 2**64 - 1)),
        min_size=1,
        max_size=5,
        unique_by=lambda row: row[3],
    )
)
def test_rows_that_were_stored(db: MysqlConnection, rows: list[tuple[bytes, str, int, int]]):
    db.execute(b"DELETE FROM literals.kept")
    values = [
        b"(%b, %b, %b, %b, %d)"
        % (quote_bytes(body), quote_text(text), quote_time(at_ms), time_number(at_ms), number)
        for body, text, at_ms, number in rows
    ]
    columns = b"body, text, at, at_number, local_id"
    db.execute(b"INSERT INTO literals.kept (%b) VALUES %b" % (columns, b", ".join(values)))

    found = db.rows(
        b"SELECT body, text, TIMESTAMPDIFF(MICROSECOND, '1970-01-01', at) DIV 1000, local_id"
        b" FROM literals.kept WHERE %b" % among([row[3] for row in rows])
    )

    assert sorted(found, key=lambda row: row[3]) == sorted(rows, key=lambda row: row[3])
    assert db.rows(b"SELECT COUNT(*) FROM literals.kept WHERE NOT at <=> at_number") == ((0,),)


@given(
    claims=st.dictionaries(
        st.integers(2**50, 2**50 + 40),
        st.tuples(st.sampled_from(["host:9010:1:web:", "it's:"]), st.integers(0, 60)),
        min_size=1,
    ),
    step=st.integers(0, 3),
)
@example(claims={2**50: ("it's:", 9), 2**50 + 1: ("it's:", 10)}, step=1)
def test_each_job_gets_its_own_claim(
    db: MysqlConnection, claims: dict[int, tuple[str, int]], step: int
):
    """Whether their numbers grow as the ids do, or not, and whatever room there is for them."""
    even = {number: ("host:9010:1:web:", 7 + step * (number - 2**50)) for number in claims}
    db.execute(b"DELETE FROM literals.kept")
    ids = b", ".join(b"(%d)" % number for number in claims)
    db.execute(b"INSERT INTO literals.kept (local_id) VALUES " + ids)

    mixed = {**even, **dict(list(claims.items())[:2])}
    for names, room in itertools.product((claims, even, mixed), (0, 6, 30)):
        texts = claims_of(sorted(names), names, room)
        found = dict(db.rows(b"SELECT local_id, %b FROM literals.kept" % texts))
        assert all(len(claim) >= room for claim in found.values())
        assert {local_id: claim.rstrip() for local_id, claim in found.items()} == {
            local_id: f"{claimer}{number}" for local_id, (claimer, number) in names.items()
        }


@given(name=st.text(st.sampled_from("ab_-1`'\\ "), min_size=1, max_size=20))
def test_names(db: MysqlConnection, name: str):
    quoted = quote_name(f"x{name}x")  # servers drop blanks at the ends of an alias

    [[found]] = db.rows(b"SELECT named.%b FROM (SELECT 7 AS %b) AS named" % (quoted, quoted))

    assert found == 7


def test_a_body_of_a_mebibyte_of_quotes(db: MysqlConnection):
    body = b"'\\" * (1 << 19)

    assert db.rows(b"SELECT LENGTH(%b)" % quote_bytes(body)) == ((1 << 20,),)


def test_what_is_no_text_is_refused():
    with pytest.raises(UnicodeEncodeError):
        quote_text("\ud800")
