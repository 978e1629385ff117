"""The login, and how a browser likes its pages."""

from __future__ import annotations

import base64
import logging
from http import HTTPStatus

from aiohttp import web

from pinlaterd.access import NotIdentified, Refusal
from pinlaterd.config.schema import UserSettings
from pinlaterd.web.site import FORM, THEMES, USER, Site, own_path

log = logging.getLogger(__name__)

_YEAR_SECONDS = 365 * 86_400
_WRONG = "The name or the password is wrong."
_TOO_OFTEN = "Too many failures from this address. Try again in a minute."


def routes(site: Site) -> list[web.RouteDef]:
    """Return the routes of the login, which need no right."""
    pages = _LoginPages(site)
    return [
        site.page("/login", pages.show, role=""),
        site.action("/login", pages.log_in, role="", writes=False),
        site.action("/logout", pages.log_out, role="", writes=False),
        site.action("/preferences", pages.prefer, role="", writes=False),
    ]


class _LoginPages:
    def __init__(self, site: Site) -> None:
        self._site = site

    async def show(self, request: web.Request) -> web.StreamResponse:
        """Ask for a name and a password."""
        if not self._site.config.users:
            raise web.HTTPSeeOther("/")
        return self._page(request, "")

    def _page(
        self, request: web.Request, problem: str, status: HTTPStatus = HTTPStatus.OK, name: str = ""
    ) -> web.Response:
        target = own_path(request.query.get("next", "/"))
        values = {"problem": problem, "target": target, "name": name}
        return self._site.render(request, "login.html", status=status, **values)

    async def log_in(self, request: web.Request) -> web.StreamResponse:
        """Begin a session, if the password is right."""
        form = request[FORM]
        try:
            user = await self._identify(request, form.get("user", ""), form.get("password", ""))
        except NotIdentified as refused:
            log.warning(
                "refused: login from %s as %r: %s",
                *(request.remote, refused.user, refused.why.name.lower()),
            )
            if refused.why is Refusal.TOO_MANY_FAILURES:
                return self._page(request, _TOO_OFTEN, HTTPStatus.TOO_MANY_REQUESTS, refused.user)
            return self._page(request, _WRONG, HTTPStatus.FORBIDDEN, refused.user)
        if user is not None:
            self._site.sessions.begin(request, user)
            log.info("%s has logged in from %s", user.name, request.remote)
        raise web.HTTPSeeOther(own_path(form.get("next", "/")))

    async def _identify(
        self, request: web.Request, name: str, password: str
    ) -> UserSettings | None:
        """Return the user with this password; None without any users. Raises NotIdentified."""
        pair = base64.b64encode(f"{name}:{password}".encode()).decode()
        return await self._site.access.identify(f"Basic {pair}", request.remote or "")

    async def log_out(self, request: web.Request) -> web.StreamResponse:
        """End the session of this browser."""
        user = request.get(USER)
        if user is not None:
            log.info("%s has logged out from %s", user.name, request.remote)
        self._site.sessions.end(request)
        raise web.HTTPSeeOther("/login")

    async def prefer(self, request: web.Request) -> web.StreamResponse:
        """Remember how this browser wants its pages."""
        form = request[FORM]
        answer = web.HTTPSeeOther(own_path(form.get("next", "")))
        for name, values in (("theme", THEMES), ("keys", ("on", "off"))):
            if form.get(name) in values:
                answer.set_cookie(name, form[name], max_age=_YEAR_SECONDS, samesite="Strict")
        raise answer
