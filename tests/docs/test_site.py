"""The built site in a real browser: no page is wider than its window, on a desk or a phone; search works in files."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from examples.web import browser
from tests.docs.pages import ROOT

pytestmark = pytest.mark.slow
SIZES = {"desk": (1280, 900), "phone": (390, 844)}
# Opens each page in a frame of the given width (a window of Chromium has 500 pixels at least); the widths of its content.
MEASURE = """<!DOCTYPE html><body style="margin:0"><script>
const pages = PAGES, found = {};
async function measure() {
  const frame = document.createElement("iframe");
  frame.style = "border:0; width:WIDTHpx; height:100vh";
  document.body.append(frame);
  for (const page of pages) {
    await new Promise(done => { frame.onload = done; frame.src = page; });
    const root = frame.contentDocument.documentElement;
    found[page] = [root.scrollWidth, frame.clientWidth, frame.contentDocument.querySelector("article").innerText.length];
  }
  frame.src = "index.html";
  await new Promise(done => { frame.onload = done; });
  await fetch("/result", {method: "POST", body: JSON.stringify({found})});
}
measure().catch(error => fetch("/result", {method: "POST", body: JSON.stringify({error: String(error)})}));
</script><img src="/finished" hidden></body>"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("mkdocs", reason="`make docs` installs mkdocs")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "-q", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"})
    return folder


@pytest.fixture(scope="module")
def chromium() -> str:
    return browser.find() or pytest.skip("needs Chromium")


@pytest.mark.parametrize("device", SIZES)
def test_no_page_scrolls_sideways(device: str, site: Path, chromium: str, tmp_path: Path) -> None:
    pages = sorted(
        str(path.relative_to(site)) for path in site.rglob("*.html") if path.name not in ("404.html", "measure.html")
    )
    assert len(pages) > 35
    (site / "measure.html").write_text(
        MEASURE.replace("PAGES", json.dumps(pages)).replace("WIDTH", str(SIZES[device][0]))
    )
    picture = tmp_path / f"{device}.png"
    found = browser.look(chromium, site, "measure.html", picture, SIZES[device])["found"]
    assert set(found) == set(pages) and all(length > 200 for _, _, length in found.values())
    assert {width for _, width, _ in found.values()} == {SIZES[device][0]}
    assert {page: width for page, (width, window, _) in found.items() if width > window} == {}
    assert picture.read_bytes().startswith(b"\x89PNG") and picture.stat().st_size > 20_000


def test_search_works_in_files(site: Path, chromium: str) -> None:
    """The results of a query in a page that is opened as a file, without a server."""
    address = f"{(site / 'index.html').as_uri()}?q=certificate"
    text = browser.run(chromium, address, SIZES["desk"], "--virtual-time-budget=20000", "--dump-dom")
    found = re.findall(r'<a href="([^"]+)" class="md-search-result__link"', text)
    assert len(found) > 2 and any("verification.html#the-certificate" in link for link in found), found
    assert not re.findall(r'<(?:script|link|img)[^>]*(?:src|href)="https?:', text), "nothing is loaded from elsewhere"
