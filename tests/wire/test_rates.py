"""What routers and the coordinator say of rates, and the note in run/rates.json."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pinlaterd.lifecycle import process_place
from pinlaterd.wire.envelope import MalformedEnvelope
from pinlaterd.wire.rates import (
    TAG,
    Holding,
    RateGrant,
    RateReport,
    RouterId,
    pack_rate_grant,
    pack_rate_report,
    read_holdings,
    unpack_rate_grant,
    unpack_rate_report,
    write_holdings,
)

ROUTER = RouterId("router-1", 42, 1000)


def test_reports_and_grants_survive_the_wire():
    report = RateReport(ROUTER, 7, {"mail": 2.5}, {"mail": 30.0}, {"mail": 0.25})
    grant = RateGrant(8, {"mail": 3.5, "paused": 0.0}, {"mail": 1.5})

    assert unpack_rate_report(pack_rate_report(report)) == report
    assert unpack_rate_grant(pack_rate_grant(grant)) == grant


@given(
    st.binary(max_size=60)
    | st.sampled_from([b"[1,{}]", b"[1,[],{}]", b'[1,{"a":-1},{}]', b'[1,{"a":NaN},{}]'])
)
def test_bytes_of_strangers_are_malformed_and_nothing_worse(data):
    with pytest.raises(MalformedEnvelope):
        unpack_rate_report(TAG + data)
    with pytest.raises(MalformedEnvelope):
        unpack_rate_grant(TAG + data)


def test_the_note_is_what_was_written_or_nothing(tmp_path):
    path = tmp_path / "rates.json"
    assert read_holdings(path) == []

    write_holdings([Holding(ROUTER, 7, {"mail": 2.5})], path)
    assert read_holdings(path) == [Holding(ROUTER, 7, {"mail": 2.5})]
    assert list(tmp_path.iterdir()) == [path]

    path.write_text(path.read_text().replace(process_place(), "another boot"))
    assert read_holdings(path) == []

    path.write_text("[[")
    assert read_holdings(path) == []
