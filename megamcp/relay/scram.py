"""SCRAM-SHA-256 (RFC 5802, RFC 7677), both sides, without channel binding.

The server side is given a password in clear, since the relay has to log in with it further on. A client whose name is
unknown is led through the same exchange with the same kind of salt and the same work, and fails at its end.
Knows no sockets: it turns messages into messages. Passwords and keys are in no error and no repr.
"""

import base64
import binascii
import functools
import hashlib
import hmac
import re
import secrets
import stringprep
import unicodedata
from typing import Final

MECHANISM: Final = "SCRAM-SHA-256"
ITERATIONS: Final = 4096
_MOST_ITERATIONS: Final = 1_000_000  # of a server's; each costs time
_PROHIBITED = (
    stringprep.in_table_c12,
    stringprep.in_table_c21_c22,
    stringprep.in_table_c3,
    stringprep.in_table_c4,
    stringprep.in_table_c5,
    stringprep.in_table_c6,
    stringprep.in_table_c7,
    stringprep.in_table_c8,
    stringprep.in_table_c9,
    stringprep.in_table_a1,
)
_CLIENT_FIRST = re.compile(r"([nyp][^,]*),,(n=[^,]*,r=([\x21-\x2b\x2d-\x7e]+)(?:,.*)?)", re.DOTALL)
_SERVER_FIRST = re.compile(r"r=([\x21-\x2b\x2d-\x7e]+),s=([A-Za-z0-9+/=]+),i=([1-9][0-9]{0,6})(?:,.*)?", re.DOTALL)
_CLIENT_FINAL = re.compile(r"(c=([A-Za-z0-9+/=]+),r=([\x21-\x2b\x2d-\x7e]+)(?:,.*)?),p=([A-Za-z0-9+/=]+)", re.DOTALL)


class ScramFailed(Exception):
    """The exchange ended without proof: wrong password."""


class ScramBroken(ScramFailed):
    """What came is no SCRAM message."""


def prepared(password: str) -> bytes:
    """SASLprep; like PostgreSQL, a password that it doesn't allow is taken as it is."""
    if password.isascii():
        return password.encode()
    mapped = "".join(" " if stringprep.in_table_c12(c) else c for c in password if not stringprep.in_table_b1(c))
    normal = unicodedata.ucd_3_2_0.normalize("NFKC", mapped)
    right_to_left = [stringprep.in_table_d1(c) for c in normal]
    mixed = any(right_to_left) and (
        any(stringprep.in_table_d2(c) for c in normal) or not (right_to_left[0] and right_to_left[-1])
    )
    if not normal or mixed or any(table(c) for c in normal for table in _PROHIBITED):
        return password.encode()
    return normal.encode()


def salted_password(password: str, salt: bytes, iterations: int) -> bytes:
    return hashlib.pbkdf2_hmac("sha256", prepared(password), salt, iterations)


_salted_again = functools.lru_cache(maxsize=1024)(salted_password)
"""For the relay's own logins: the server's salt stays, and the work is done at each change of a backend."""


def _mac(key: bytes, text: bytes) -> bytes:
    return hmac.digest(key, text, "sha256")


def _xor(a: bytes, b: bytes) -> bytes:
    return bytes(x ^ y for x, y in zip(a, b, strict=True))


def _decoded(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except binascii.Error:
        raise ScramBroken("not base64") from None


def _text(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise ScramBroken("not UTF-8") from None


class ScramServer:
    """One client's login. `password` None: there is no such user, and the exchange fails whatever comes."""

    def __init__(self, password: str | None, salt: bytes, *, nonce: str | None = None) -> None:
        self._known = password is not None
        self._password = password if password is not None else secrets.token_urlsafe(24)
        self._salt = salt
        self._own = nonce or secrets.token_urlsafe(18)
        self._header = self._nonce = ""
        self._said = b""

    def first(self, data: bytes) -> bytes:
        """The answer to the client's first message. Raises ScramBroken."""
        found = _CLIENT_FIRST.fullmatch(_text(data))
        if not found or found[1] not in ("n", "y"):
            raise ScramBroken("malformed SCRAM message")
        self._header = f"{found[1]},,"
        self._nonce = found[3] + self._own
        answer = f"r={self._nonce},s={base64.b64encode(self._salt).decode()},i={ITERATIONS}".encode()
        self._said = found[2].encode() + b"," + answer
        return answer

    def final(self, data: bytes) -> bytes:
        """The server's proof. Raises ScramFailed for a wrong password."""
        found = _CLIENT_FINAL.fullmatch(_text(data))
        if not found or found[3] != self._nonce or _decoded(found[2]) != self._header.encode():
            raise ScramBroken("malformed SCRAM message")
        proof = _decoded(found[4])
        salted = salted_password(self._password, self._salt, ITERATIONS)
        stored = hashlib.sha256(_mac(salted, b"Client Key")).digest()
        everything = self._said + b"," + found[1].encode()
        if len(proof) != len(stored):
            raise ScramBroken("malformed SCRAM message")
        claimed = hashlib.sha256(_xor(proof, _mac(stored, everything))).digest()
        if not hmac.compare_digest(claimed, stored) or not self._known:
            raise ScramFailed("wrong password")
        return b"v=" + base64.b64encode(_mac(_mac(salted, b"Server Key"), everything))


class ScramClient:
    """The relay's login to a server, which has to prove that it knows the password too."""

    def __init__(self, user: str, password: str, *, nonce: str | None = None) -> None:
        self._password = password
        self._nonce = nonce or secrets.token_urlsafe(18)
        self._bare = f"n={user.replace('=', '=3D').replace(',', '=2C')},r={self._nonce}"
        self._expected = b""

    def first(self) -> bytes:
        return f"n,,{self._bare}".encode()

    def final(self, data: bytes) -> bytes:
        """The proof for the server's first message. Raises ScramBroken."""
        found = _SERVER_FIRST.fullmatch(_text(data))
        if not found or not found[1].startswith(self._nonce) or int(found[3]) > _MOST_ITERATIONS:
            raise ScramBroken("malformed SCRAM message")
        salted = _salted_again(self._password, _decoded(found[2]), int(found[3]))
        client_key = _mac(salted, b"Client Key")
        without_proof = f"c=biws,r={found[1]}"
        everything = f"{self._bare},{_text(data)},{without_proof}".encode()
        signature = _mac(hashlib.sha256(client_key).digest(), everything)
        self._expected = b"v=" + base64.b64encode(_mac(_mac(salted, b"Server Key"), everything))
        return f"{without_proof},p={base64.b64encode(_xor(client_key, signature)).decode()}".encode()

    def check(self, data: bytes) -> None:
        """Raises ScramFailed when the server doesn't know the password."""
        if not hmac.compare_digest(data, self._expected):
            raise ScramFailed("the server could not prove that it knows the password")
