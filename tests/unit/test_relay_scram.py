"""SCRAM-SHA-256: the RFC's own exchange, both sides against each other, and what is no exchange."""

import base64

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megamcp.relay import scram
from megamcp.relay.scram import ScramBroken, ScramClient, ScramFailed, ScramServer, prepared

# RFC 7677, section 3: user "user", password "pencil"
CLIENT_NONCE = "rOprNGfwEbeRWgbNEkqO"
SERVER_NONCE = "%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0"
SALT = base64.b64decode("W22ZaJ0SNY7soEsUEjb6gQ==")
FIRST = b"n,,n=user,r=rOprNGfwEbeRWgbNEkqO"
CHALLENGE = b"r=rOprNGfwEbeRWgbNEkqO%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0,s=W22ZaJ0SNY7soEsUEjb6gQ==,i=4096"
FINAL = b"c=biws,r=rOprNGfwEbeRWgbNEkqO%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0,p=dHzbZapWIk4jUhN+Ute9ytag9zjfMHgsqmmiz7AndVQ="
PROOF = b"v=6rriTRBi23WpRR/wtup+mMhUZUn/dB5nLTJRsjl95G4="


def test_the_client_says_what_the_rfc_says() -> None:
    client = ScramClient("user", "pencil", nonce=CLIENT_NONCE)
    assert client.first() == FIRST
    assert client.final(CHALLENGE) == FINAL
    client.check(PROOF)


def test_the_server_says_what_the_rfc_says() -> None:
    server = ScramServer("pencil", SALT, nonce=SERVER_NONCE)
    assert server.first(FIRST) == CHALLENGE
    assert server.final(FINAL) == PROOF


def test_a_server_without_the_password_is_found_out() -> None:
    client = ScramClient("user", "pencil", nonce=CLIENT_NONCE)
    client.final(CHALLENGE)
    with pytest.raises(ScramFailed):
        client.check(PROOF.replace(b"6", b"7"))


@settings(max_examples=25, deadline=None)
@given(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"])), st.text(max_size=8))
def test_every_password_opens_its_own_login_and_no_other(password: str, other: str) -> None:
    for said in (password, other.replace("\0", "") if other.isascii() else "x"):
        client, server = ScramClient("", said), ScramServer(password, SALT)
        final = client.final(server.first(client.first()))
        if prepared(said) == prepared(password):
            client.check(server.final(final))
        else:
            with pytest.raises(ScramFailed):
                server.final(final)


def test_a_login_that_does_not_exist_fails_with_any_password() -> None:
    client, server = ScramClient("", "None"), ScramServer(None, SALT)
    with pytest.raises(ScramFailed):
        server.final(client.final(server.first(client.first())))


@pytest.mark.parametrize(
    ("password", "expected"),
    [
        ("I\u00adX", b"IX"),  # RFC 4013, section 3
        ("user", b"user"),
        ("\u00aa", b"a"),
        ("\u2168", b"IX"),
        ("a\u00a0b", b"a b"),
        ("\u00ad\u0007", "\u00ad\u0007".encode()),  # prohibited: taken as it is
        ("\u0627\u0031", "\u0627\u0031".encode()),  # right to left must end so
    ],
)
def test_passwords_are_prepared_as_postgresql_does(password: str, expected: bytes) -> None:
    assert prepared(password) == expected


@pytest.mark.parametrize(
    "first",
    [
        b"",
        b"p=tls-server-end-point,,n=,r=abc",
        b"n,a=admin,n=,r=abc",
        b"n,,n=,r=",
        b"n,,r=abc",
        b"x,,n=,r=abc",
        b"n,,m=ext,n=,r=abc",
        b"n,,n=,r=\xff",
    ],
)
def test_what_is_no_first_message_is_refused(first: bytes) -> None:
    with pytest.raises(ScramBroken):
        ScramServer("pencil", SALT).first(first)


@given(st.binary(max_size=200))
def test_no_bytes_crash_the_server_or_let_anybody_in(data: bytes) -> None:
    server = ScramServer("pencil", SALT, nonce=SERVER_NONCE)
    server.first(FIRST)
    for attempt in (data, FINAL[:-4] + data, b"c=biws,r=" + data + b",p=AAAA", FINAL.replace(b"biws", b"eSws")):
        with pytest.raises(ScramFailed):
            server.final(attempt)
    with pytest.raises(ScramBroken):
        ScramClient("", "pencil").final(data)


def test_a_server_that_asks_for_endless_work_is_refused() -> None:
    client = ScramClient("", "pencil", nonce="abc")
    with pytest.raises(ScramBroken):
        client.final(b"r=abcdef,s=AAAA,i=9999999")


def test_the_work_is_what_postgresql_asks_for() -> None:
    assert scram.ITERATIONS == 4096
