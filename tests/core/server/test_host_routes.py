"""Routes of platforms: how a request finds its own."""

from __future__ import annotations

from remora.server.host_routes import HostRoute, RouteTable


def test_a_star_in_a_route_stands_for_one_name() -> None:
    star, exact = HostRoute("POST", "/a/*/b", "infer"), HostRoute("POST", "/a/x/b", "load")
    table = RouteTable((star, exact, HostRoute("GET", "/a", "index")))
    assert [table.find("POST", path) for path in ("/a/y/b", "/a/x/b")] == [star, exact]
    assert {table.find("POST", path) for path in ("/a//b", "/a/y/z/b", "/a/y", "/a")} == {None}
    assert table.find("GET", "/a/y/b") is None
    assert RouteTable().find("GET", "/a") is None
