"""The admin password's hash."""

from __future__ import annotations

import pytest

from pinlaterd.config.password import hash_password, is_hash, verify_password


def test_only_the_password_itself_is_verified():
    stored = hash_password("sésame")

    assert verify_password("sésame", stored)
    assert not verify_password("sesame", stored)
    assert not verify_password("", stored)


def test_each_hash_has_its_own_salt():
    assert hash_password("a") != hash_password("a")


def test_a_hash_is_text_of_six_parts():
    name, n, r, p, _salt, _digest = hash_password("a").split("$")

    assert (name, n, r, p) == ("scrypt", "16384", "8", "1")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "a",
        "scrypt$16384$8$1$AAAA",
        "scrypt$16383$8$1$AAAA$AAAAAAAAAAAAAAAAAAAAAA==",
        "scrypt$0$8$1$AAAA$AAAAAAAAAAAAAAAAAAAAAA==",
        "scrypt$1073741824$8$1$AAAA$AAAAAAAAAAAAAAAAAAAAAA==",
        "scrypt$16384$8$1$!!$AAAAAAAAAAAAAAAAAAAAAA==",
        "scrypt$16384$8$1$AAAA$AA==",
        "scrypt$x$8$1$AAAA$AAAAAAAAAAAAAAAAAAAAAA==",
    ],
)
def test_what_is_no_hash_lets_nobody_in(text):
    assert not is_hash(text)
    assert not verify_password("", text)
