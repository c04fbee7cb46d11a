"""Passwords of databases' logins, as PostgreSQL keeps them."""

from megamcp.state.clones.logins import is_password, scram_verifier


def test_a_verifier_is_of_its_password_alone() -> None:
    assert is_password(scram_verifier("one"), "one")
    assert not is_password(scram_verifier("one"), "two")
    assert not is_password("", "one")


def test_a_verifier_whose_rounds_would_take_hours_is_refused_unread() -> None:
    verifier = scram_verifier("one").replace("$1:", f"${2**31 - 1}:", 1)
    assert not is_password(verifier, "one")
