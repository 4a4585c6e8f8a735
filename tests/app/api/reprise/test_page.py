import hashlib
import json
import re
import tomllib

import pytest

from reprise.app.api.reprise.page import CURRENT, DIRECTORY, FILES
from tests.app.fakes import FakeEngine, Running, in_process, make_settings

VENDOR = DIRECTORY / "vendor"
# How our files name others.
IMPORTED = r"(?:from |import |import\()\"\./([\w./-]+)\""
ADDRESSED = r"(?:src|href)=\"/page/([\w./-]+)\""
BESIDE = r"new URL\(\"([\w./-]+)\", import"


async def test_the_page_is_served_with_a_policy_that_lets_nothing_in(running: Running):
    response = await running.http.get("/")
    assert response.headers["content-type"] == "text/html; charset=utf-8"
    policy = dict(part.strip().split(" ", 1) for part in response.headers["content-security-policy"].split(";"))
    assert policy["default-src"] == "'none'"
    for source in ("script-src", "style-src", "img-src", "connect-src"):
        assert policy[source] == "'self'"
    assert policy["frame-ancestors"] == policy["base-uri"] == "'none'"
    assert "unsafe" not in response.headers["content-security-policy"]
    assert response.headers["x-content-type-options"] == "nosniff"


async def test_a_file_that_did_not_change_is_not_sent_again(running: Running):
    first = await running.http.get("/page/app.js")
    assert first.headers["content-type"] == "text/javascript; charset=utf-8"
    again = await running.http.get("/page/app.js", headers={"if-none-match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")


async def test_the_html_names_files_that_a_browser_keeps(running: Running):
    html = (await running.http.get("/")).text
    named = re.findall(r'"(/page/[^"]*)"', html)
    assert f"{CURRENT}app.js" in named
    for path in named:
        response = await running.http.get(path)
        assert (response.status_code, path.startswith(CURRENT)) == (200, True), path
        assert "immutable" in response.headers["cache-control"]
    for path in ("/", "/docs", "/page/app.js"):
        assert (await running.http.get(path)).headers["cache-control"] == "no-cache"


async def test_a_page_from_before_an_update_gets_the_files_of_now_for_once(running: Running):
    response = await running.http.get("/page/0123456789ab/bring.js")
    assert response.content == FILES["bring.js"].body
    assert response.headers["cache-control"] == "no-cache"
    assert (await running.http.get("/page/0123456789ab/nothing.js")).status_code == 404


@pytest.mark.parametrize("name", ["", "nothing.js", "..%2Fmain.py", "../main.py", "%2e%2e/main.py", "app.js/x", ".."])
async def test_nothing_else_is_a_file_of_the_page(running: Running, name):
    response = await running.http.get(f"/page/{name}")
    assert response.status_code in (200, 404)
    if response.status_code == 200:  # the client itself resolved '..'
        assert response.content == FILES["index.html"].body
    else:
        assert response.json()["error"]["code"] == "unknown_url"


async def test_the_page_needs_no_key_and_what_it_asks_for_does(engine: FakeEngine, tmp_path):
    async with in_process(engine, make_settings(tmp_path, server={"api_keys": ("sk-somebody",)})) as running:
        for path, status in (
            ("/", 200),
            ("/docs", 200),
            ("/page/app.js", 200),
            ("/page/x", 404),
            ("/v1/models", 401),
            ("/pag", 401),
        ):
            assert (await running.http.get(path)).status_code == status


def test_every_file_of_ours_loads_only_what_is_here():
    for path in DIRECTORY.iterdir():
        if path == VENDOR:
            continue
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", text), (
            path
        )
        for address in re.findall(r"https?://[^\s\"'`)<]+", text):
            assert address.startswith("http://www.w3.org/"), (path, address)  # names, not loads
        names = re.findall(IMPORTED, text) + re.findall(ADDRESSED, text) + re.findall(BESIDE, text)
        for name in names:
            assert name in FILES, (path, name)


def test_other_peoples_files_are_those_of_the_manifest():
    manifest = json.loads((VENDOR / "manifest.json").read_text(encoding="utf-8"))
    listed = {}
    for package in manifest["packages"]:
        assert package["licence_file"] in package["files"]
        listed |= package["files"]
    there = {path.relative_to(VENDOR).as_posix() for path in VENDOR.rglob("*") if path.is_file()}
    assert there == {*listed, "manifest.json"}
    for name, file in listed.items():
        body = (VENDOR / name).read_bytes()
        assert hashlib.sha256(body).hexdigest() == file["sha256"], name
        if "original_sha256" in file:
            original = body.removesuffix(b"\nexport default temml;\n")
            assert hashlib.sha256(original).hexdigest() == file["original_sha256"]


async def test_their_files_are_served_too(running: Running):
    response = await running.http.get("/page/vendor/prism/prism-c.js")
    assert response.content == (VENDOR / "prism" / "prism-c.js").read_bytes()
    assert (await running.http.get("/page/vendor/marked.LICENSE.txt")).headers["content-type"].startswith("text/plain")
    assert (await running.http.get("/page/vendor/manifest.json")).status_code == 404


def test_the_page_is_part_of_the_package():
    assert {"index.html", "app.js", "style.css", "vendor/marked.js"} <= FILES.keys()
    project = tomllib.loads((DIRECTORY.parent.parent / "pyproject.toml").read_text(encoding="utf-8"))
    (pattern,) = project["tool"]["setuptools"]["package-data"]["reprise.app"]
    packed = {path for path in DIRECTORY.parent.glob(f"{pattern}/*") if path.is_file()}  # as setuptools reads it
    assert packed == {path for path in DIRECTORY.rglob("*") if path.is_file()}
