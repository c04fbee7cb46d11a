"""What browsers and authorization servers see: the page that a consent comes back to, and who the gateway is.

Without the API key: whoever comes back is a person's browser, which shows the `state` that it was given.
"""

import logging
from html import escape

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse, JSONResponse

from megamcp.errors import MegaMCPError
from megamcp.oauth import tokens as oauth
from megamcp.oauth.authorities import Authorities

log = logging.getLogger(__name__)

router = APIRouter(prefix="/oauth", include_in_schema=False)
_PAGE = """<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>MegaMCP</title>
<style>body{{font:16px/1.5 system-ui,sans-serif;max-width:36em;margin:20vh auto;padding:0 1em}}</style>
<h1>{title}</h1><p>{text}</p></html>
"""
_SAFE = {
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
}


@router.get("/callback", summary="Where a consent for a tool server comes back to", response_class=HTMLResponse)
async def callback(request: Request) -> HTMLResponse:
    """Takes an authorization server's answer, once, and shows a page that says what came of it."""
    authorities: Authorities = request.app.state.services.authorities
    try:
        place = await authorities.finish(dict(request.query_params))
    except MegaMCPError as error:
        log.info("a consent came to nothing: %s", error.message)
        return _page("Not authorized", f"{error.message} {error.hint or ''}", error.status)
    log.info("tool server %s of environment %s is authorized", place.server, place.environment)
    told = f"Tool server “{place.server}” of environment “{place.environment}” may be used now. Close this page."
    return _page("Authorized", told, 200)


@router.get("/client.json", summary="The gateway as a client of authorization servers")
async def client(request: Request) -> JSONResponse:
    """Its client id metadata document, used where the gateway's public URL is https."""
    base = request.app.state.services.authorities.base
    document = oauth.metadata_document(f"{base}/oauth/callback", (), "none")
    return JSONResponse({"client_id": f"{base}/oauth/client.json", "client_uri": base, **document})


def _page(title: str, text: str, status: int) -> HTMLResponse:
    return HTMLResponse(_PAGE.format(title=escape(title), text=escape(text)), status, headers=_SAFE)
