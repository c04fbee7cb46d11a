"""What a strange tool server may lead the gateway to, and how its words are read."""

import msgspec
import pytest

from megamcp.errors import UpstreamError
from megamcp.oauth import fetch
from megamcp.oauth.discovery import Challenge, Discovery, Issuer, same_issuer
from megamcp.oauth.fetch import Fetched, Fetcher, place_allowed
from megamcp.oauth.tokens import Client, Tokens, auth_method

FAR = "https://tools.example/mcp"


@pytest.mark.parametrize(
    ("url", "resource", "allowed"),
    [
        ("https://as.example/x", FAR, True),
        ("https://as.example:8443/x", FAR, True),
        ("http://as.example/x", FAR, False),
        ("http://tools.example/x", FAR, False),
        ("http://tools.internal:9000/x", "http://tools.internal/mcp", True),
        ("http://127.0.0.1:1/x", FAR, False),
        ("http://127.0.0.1:1/x", "http://tools.internal/mcp", False),
        ("http://127.0.0.1:1/x", "http://localhost:2/mcp", True),
        ("https://user:word@as.example/x", FAR, False),
        ("file:///etc/passwd", FAR, False),
        ("javascript:alert(1)", FAR, False),
        ("https://as.example:x/", FAR, False),
        ("https://äs.example/", FAR, False),
    ],
)
def test_only_some_places_may_be_named(url: str, resource: str, allowed: bool) -> None:
    assert place_allowed(url, resource) is allowed


@pytest.mark.parametrize(
    ("place", "own", "allowed"),
    [
        ("203.0.113.9", "198.51.100.1", True),
        ("8.8.8.8", "1.1.1.1", True),
        ("10.0.0.1", "1.1.1.1", False),
        ("127.0.0.1", "1.1.1.1", False),
        ("::ffff:127.0.0.1", "1.1.1.1", False),
        ("127.0.0.1", "10.0.0.1", False),
        ("10.0.0.2", "10.0.0.1", True),
        ("8.8.8.8", "10.0.0.1", True),
        ("169.254.169.254", "127.0.0.1", False),
        ("0.0.0.0", "127.0.0.1", False),
        ("fe80::1", "::1", False),
        ("fd00::1", "2606:4700::1", False),
    ],
)
async def test_no_place_is_nearer_to_the_gateway_than_the_server_that_names_it(
    monkeypatch: pytest.MonkeyPatch, place: str, own: str, allowed: bool
) -> None:
    async def looked_up(host: str, _port: int) -> list[str]:
        return [place if host == "as.example" else own]

    monkeypatch.setattr(fetch, "_lookup", looked_up)
    fetcher = Fetcher("s", FAR)
    if allowed:
        assert (await fetcher._address("https://as.example/x")).ip == place
    else:
        with pytest.raises(UpstreamError) as refused:
            await fetcher.get("https://as.example/x")
        assert refused.value.code == "authorization_failed"


@pytest.mark.parametrize(
    ("header", "error", "scopes", "metadata"),
    [
        (None, None, (), None),
        ("Basic realm=x", None, (), None),
        ("Bearer", None, (), None),
        ('Bearer scope="a b", resource_metadata="https://x/y"', None, ("a", "b"), "https://x/y"),
        ('Basic realm="b", bearer error=insufficient_scope, scope=a', "insufficient_scope", ("a",), None),
        ('Bearer error_description="a scope=\\"x\\" more", scope="y"', None, ("y",), None),
    ],
)
def test_a_challenge_is_read_as_http_has_it(
    header: str | None, error: str | None, scopes: tuple[str, ...], metadata: str | None
) -> None:
    assert Challenge.read(header) == Challenge(error, scopes, metadata)


def test_issuers_are_compared_as_texts() -> None:
    assert same_issuer("https://as.example", "https://as.example/")
    assert same_issuer("https://as.example/a", "https://as.example/a")
    for other in ("https://as.example/a/", "https://AS.example/a", "https://as.example:443/a"):
        assert not same_issuer("https://as.example/a", other)


class Web(Fetcher):
    """Answers from a table; 404 for the rest."""

    def __init__(self, pages: dict[str, object]) -> None:
        super().__init__("s", FAR)
        self.pages = pages
        self.asked: list[str] = []

    async def get(self, url: str) -> Fetched:
        self.asked.append(url)
        page = self.pages.get(url)
        return Fetched(page, b"") if isinstance(page, int) else Fetched(200 if page else 404, msgspec.json.encode(page))


def issuer(url: str = "https://as.example/t", **more: object) -> dict[str, object]:
    return {"issuer": url, "token_endpoint": "https://as.example/token"} | more


PRM = "https://tools.example/.well-known/oauth-protected-resource"


async def test_metadata_is_looked_for_in_the_order_of_the_specification() -> None:
    web = Web({PRM: {"resource": "https://tools.example", "authorization_servers": ["https://as.example/t"]}})
    web.pages["https://as.example/t/.well-known/openid-configuration"] = issuer()
    found = await Discovery("s", FAR, web, None).find(Challenge(resource_metadata="https://tools.example/meta"))
    assert web.asked == [
        "https://tools.example/meta",
        f"{PRM}/mcp",
        PRM,
        "https://as.example/.well-known/oauth-authorization-server/t",
        "https://as.example/.well-known/openid-configuration/t",
        "https://as.example/t/.well-known/openid-configuration",
    ]
    assert (found.issuer.issuer, found.resource) == ("https://as.example/t", "https://tools.example")


@pytest.mark.parametrize(
    ("resource", "metadata"),
    [
        ({"resource": "https://other.example/mcp"}, issuer()),
        ({"resource": "https://tools.example/mc"}, issuer()),
        ({"resource": "http://["}, issuer()),
        ({"authorization_servers": ["http://["]}, issuer()),
        ({"authorization_servers": ["https://[x"]}, issuer()),
        ({}, issuer("https://evil.example/t")),
        ({}, issuer(token_endpoint="http://127.0.0.1/token")),
        ({}, 503),
    ],
)
async def test_what_does_not_fit_together_is_refused(resource: dict[str, object], metadata: object) -> None:
    told = {"resource": FAR, "authorization_servers": ["https://as.example/t"], **resource}
    web = Web({f"{PRM}/mcp": told, "https://as.example/.well-known/oauth-authorization-server/t": metadata})
    with pytest.raises(UpstreamError):
        await Discovery("s", FAR, web, None).find(Challenge())


@pytest.mark.parametrize("url", ["http://[", "https://a..b/x", f"https://{'a' * 300}.example/", "", "//x", "https://"])
async def test_a_place_that_is_none_is_an_error_like_others(url: str) -> None:
    with pytest.raises(UpstreamError) as failed:
        await Fetcher("s", FAR).get(url)
    assert failed.value.code == "authorization_failed"


async def test_a_servers_error_is_no_reason_to_look_elsewhere() -> None:
    web = Web({f"{PRM}/mcp": 503, "https://tools.example/.well-known/oauth-authorization-server": issuer()})
    with pytest.raises(UpstreamError):
        await Discovery("s", FAR, web, None).find(Challenge())


async def test_credentials_go_to_the_issuer_that_they_are_of() -> None:
    told = {"resource": FAR, "authorization_servers": ["https://evil.example", "https://as.example/t"]}
    web = Web({f"{PRM}/mcp": told, "https://as.example/.well-known/oauth-authorization-server/t": issuer()})
    found = await Discovery("s", FAR, web, "https://as.example/t").find(Challenge())
    assert found.issuer.issuer == "https://as.example/t"
    with pytest.raises(UpstreamError):
        await Discovery("s", FAR, web, "https://third.example").find(Challenge())


def test_a_client_authenticates_in_a_way_that_is_offered() -> None:
    def offered(*methods: str) -> Issuer:
        return Issuer(issuer="i", token_endpoint="t", token_endpoint_auth_methods_supported=list(methods) or None)

    assert auth_method(offered(), secret=True) == "client_secret_basic"
    assert auth_method(offered("client_secret_post"), secret=True) == "client_secret_post"
    assert auth_method(offered("client_secret_basic"), secret=False) == "none"


def test_nothing_secret_is_shown() -> None:
    shown = repr((Client(id="c", secret="sesame", key="sesame"), Tokens(access="sesame", refresh="sesame")))
    assert "sesame" not in shown
