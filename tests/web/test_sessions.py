"""Sessions end by time, by a new password and by a removed user; only their hashes are kept."""

from __future__ import annotations

import pytest
from aiohttp.test_utils import make_mocked_request

from pinlaterd.config.schema import UserSettings
from pinlaterd.web.sessions import Sessions

ADA = UserSettings("ada", ("view",), password_hash="scrypt$1")
USERS = {"ada": ADA}
MINUTE, HOUR = 60, 3600


def request_with(secret: str, path: str = "/"):
    return make_mocked_request("GET", path, headers={"Cookie": f"c={secret}"})


def begin(sessions: Sessions) -> str:
    request = make_mocked_request("POST", "/login")
    sessions.begin(request, ADA)
    response = Cookies()
    sessions.keep_cookie(request, response)  # type: ignore[arg-type]
    return response.value


class Cookies:
    value = ""

    def set_cookie(self, name: str, value: str, **flags: object) -> None:
        self.value = value
        assert flags["httponly"]
        assert flags["samesite"] == "Strict"


def test_a_session_ends_an_hour_after_its_last_use_and_after_twelve_in_any_case(clock, tmp_path):
    sessions = Sessions(clock, "c", tmp_path / "sessions.json")
    secret = begin(sessions)

    for _ in range(13):
        clock.advance(55 * MINUTE)
        assert sessions.user_of(request_with(secret), USERS) == ADA
    clock.advance(6 * MINUTE)  # 12 h 1 min in all
    assert sessions.user_of(request_with(secret), USERS) is None

    secret = begin(sessions)
    clock.advance(HOUR + 1)
    assert sessions.user_of(request_with(secret), USERS) is None


@pytest.mark.parametrize("path", ["/live", "/q/mail/history.json?range=6h", "/find.json?q=x"])
def test_an_open_page_does_not_keep_a_session_alive(clock, tmp_path, path):
    sessions = Sessions(clock, "c", tmp_path / "sessions.json")
    secret = begin(sessions)

    for _ in range(3):
        clock.advance(25 * MINUTE)
        found = sessions.user_of(request_with(secret, path), USERS)

    assert found is None


def test_a_session_ends_with_its_password_and_with_its_user(clock, tmp_path):
    sessions = Sessions(clock, "c", tmp_path / "sessions.json")
    first, second = begin(sessions), begin(sessions)

    changed = {"ada": UserSettings("ada", ("view",), password_hash="scrypt$2")}
    assert sessions.user_of(request_with(first), changed) is None
    assert sessions.user_of(request_with(second), {}) is None
    assert sessions.user_of(request_with(second), USERS) is None


def test_sessions_outlast_the_process_and_only_hashes_are_kept(clock, tmp_path):
    file = tmp_path / "sessions.json"
    secret = begin(Sessions(clock, "c", file))

    assert Sessions(clock, "c", file).user_of(request_with(secret), USERS) == ADA
    assert secret not in file.read_text()
    assert file.stat().st_mode & 0o777 == 0o600
    file.write_text("{")
    assert Sessions(clock, "c", file).user_of(request_with(secret), USERS) is None
