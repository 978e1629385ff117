"""What servers of either kind say of replication, as words of one kind."""

from __future__ import annotations

import pytest

from pinlaterd.config.schema import Address
from pinlaterd.engines.mysql.replication import is_included, replica_status, words_of

# As MySQL 8.4 documents SHOW REPLICA STATUS; MariaDB's is read from a real one (test_failover.py).
MYSQL_8 = {
    "Replica_IO_State": "Waiting for source to send event",
    "Source_Host": "db-a",
    "Source_User": "repl",
    "Source_Port": 3306,
    "Source_Log_File": "binlog.000004",
    "Read_Source_Log_Pos": 895,
    "Relay_Log_File": "relay.000002",
    "Relay_Log_Pos": 1000,
    "Relay_Source_Log_File": "binlog.000004",
    "Replica_IO_Running": "Yes",
    "Replica_SQL_Running": "Yes",
    "Replicate_Do_DB": "",
    "Replicate_Ignore_Server_Ids": "",
    "Replicate_Rewrite_DB": "",
    "Exec_Source_Log_Pos": 895,
    "Source_SSL_Allowed": "Yes",
    "Seconds_Behind_Source": 0,
    "Last_IO_Error": "",
    "Last_SQL_Error": "",
    "Source_Server_Id": 1,
    "Source_UUID": "3e11fa47-71ca-11e1-9e33-c80aa9429562",
    "Retrieved_Gtid_Set": "",
    "Executed_Gtid_Set": "",
    "Auto_Position": 1,
}


def _as_before_8_0_22(row: dict[str, object]) -> dict[str, object]:
    return {
        name.replace("Source", "Master").replace("Replica_", "Slave_"): value
        for name, value in row.items()
    }


@pytest.mark.parametrize("row", [MYSQL_8, _as_before_8_0_22(MYSQL_8)])
def test_a_replica_of_mysql_says_how_far_it_is(row):
    status = replica_status(row, channels=1)

    assert status.source == Address("db-a", 3306)
    assert status.source_id == "3e11fa47-71ca-11e1-9e33-c80aa9429562"
    assert (status.receives, status.applies) == (True, True)
    assert status.received == status.applied == "binlog.000004:895"
    assert (status.by_gtid, status.encrypted, status.filters) == (True, True, "")
    assert status.behind_seconds == 0


def test_what_a_replica_of_mysql_leaves_out_is_seen():
    row = {**MYSQL_8, "Replicate_Rewrite_DB": "(a,b)", "Seconds_Behind_Source": None}

    status = replica_status(row, channels=1)

    assert status.filters == "Replicate_Rewrite_DB (a,b)"
    assert status.behind_seconds is None


@pytest.mark.parametrize(
    ("version", "is_mariadb", "status", "position"),
    [
        ("10.11.19-MariaDB", True, b"SHOW ALL SLAVES STATUS", b"SHOW MASTER STATUS"),
        ("5.7.44-log", False, b"SHOW SLAVE STATUS", b"SHOW MASTER STATUS"),
        ("8.0.22", False, b"SHOW SLAVE STATUS", b"SHOW MASTER STATUS"),
        ("8.0.36-28 Percona", False, b"SHOW REPLICA STATUS", b"SHOW MASTER STATUS"),
        ("8.4.0", False, b"SHOW REPLICA STATUS", b"SHOW BINARY LOG STATUS"),
        ("9.1.0", False, b"SHOW REPLICA STATUS", b"SHOW BINARY LOG STATUS"),
    ],
)
def test_each_server_is_spoken_to_in_its_words(version, is_mariadb, status, position):
    words = words_of(version, is_mariadb=is_mariadb)

    assert (words.replica_status, words.binlog_status) == (status, position)


@pytest.mark.parametrize(
    ("applied", "wanted", "included"),
    [
        ("0-1-100", "0-1-100", True),
        ("0-2-101", "0-1-100", True),
        ("0-1-99", "0-1-100", False),
        ("0-1-100", "0-1-100,1-1-5", False),
        ("1-1-5,0-1-100", "0-1-100,1-1-5", True),
        ("", "0-1-1", False),
        ("", "", True),
    ],
)
def test_mariadbs_gtids_are_compared_by_domain(applied, wanted, included):
    assert is_included(wanted, applied) == included
