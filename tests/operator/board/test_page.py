"""The board's page in headless Chromium: content, keyboard, phone width, contrast, and requests.

Set TRIMTAB_AXE_CORE to the path of axe-core's axe.min.js to check the page's accessibility with it, too.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp.test_utils import TestServer
from headless_browser import CHROMIUM, Page, open_browser
from trimtab_operator.board.recorder import Recorder, keep_decisions
from trimtab_operator.board.server import build_application
from trimtab_operator.board.timeline import Series
from trimtab_operator.tuner.moves import Decision, Expectation, Measure, Move, Reason
from trimtab_operator.tuner.parameters import Parameter

pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed"),
    pytest.mark.timeout(180),
]
AXE = os.environ.get("TRIMTAB_AXE_CORE")
NOW = 1_790_000_400.0
HOSTILE = '<img src="x" onerror="document.title = \'hacked\'">'
PHONE, DESKTOP = (360, 800), (1440, 1000)
READY = "document.querySelectorAll('figure').length > 9 && document.querySelectorAll('#cards li').length > 1"

# Text with less contrast than WCAG AA requires (4.5, or 3 if large), on the nearest background colour.
LOW_CONTRAST = """
(() => {
  const canvas = Object.assign(document.createElement("canvas"), { width: 1, height: 1 });
  const context = canvas.getContext("2d", { willReadFrequently: true });
  const rgba = (color) => {
    context.clearRect(0, 0, 1, 1);
    context.fillStyle = color;
    context.fillRect(0, 0, 1, 1);
    return [...context.getImageData(0, 0, 1, 1).data];
  };
  const luminance = (color) => {
    const [r, g, b] = color.map((v) => v / 255).map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const background = (node) => {
    for (let at = node; at; at = at.parentElement) {
      const found = rgba(getComputedStyle(at).backgroundColor);
      if (found[3] === 255) return found;
    }
    return [255, 255, 255, 255];
  };
  const low = [];
  for (const node of document.querySelectorAll("body *")) {
    const hasText = [...node.childNodes].some((child) => child.nodeType === 3 && child.textContent.trim());
    if (!hasText || !node.getClientRects().length || node.closest(".skip, .hidden, noscript, script")) continue;
    const style = getComputedStyle(node);
    const color = node.namespaceURI.endsWith("svg") ? style.fill : style.color;
    const [a, b] = [luminance(rgba(color)), luminance(background(node))].sort((one, other) => other - one);
    const ratio = (a + 0.05) / (b + 0.05);
    if (ratio < 4.5) low.push(`${node.tagName} "${node.textContent.slice(0, 30)}" ${ratio.toFixed(2)}`);
  }
  return low;
})()
"""
FOCUSED = """
(() => {
  const at = document.activeElement;
  const place = at.closest("#marks") ? "mark" : at.closest("#cards") ? "card" : at.className;
  return at.id || at.dataset.range || at.dataset.key || place;
})()
"""


def make_decision(number: int, sentence: str) -> Decision:
    expected = (Expectation(Measure.ITL_P95, 0.09, 0.05, 0.04, 0.06),)
    move = Move(Reason.CHUNKS_TOO_LARGE, Parameter.MAX_NUM_BATCHED_TOKENS, 2048, 1024, {}, expected)
    return Decision(f"d-{number}", NOW - 900 * number, move, sentence, f"kept: {HOSTILE}")


def make_recorder() -> Recorder:
    """Return a recorder with a served deployment and one that cannot start."""
    recorder = Recorder()
    for name in ("chat", "waiting"):
        record = recorder.find_or_add(("team-a", name), "u")
        assert record is not None
        record.mode = "Auto"
        record.status = {"phase": "Ready", "ready": "2/2", "model": HOSTILE}
        for number in range(241):
            at, load = NOW - 3600 + 15 * number, 1 + math.sin(number / 20)
            values = dict.fromkeys(Series, load)
            values |= {Series.TTFT: load / 4, Series.TTFT_OBJECTIVE: 0.3, Series.KV_USAGE: load / 2}
            record.timeline.add(at, values)
        keep_decisions(record, [make_decision(3, f"Lowered it. {HOSTILE}"), make_decision(1, "Lowered it again.")])
    assert record is not None
    condition = {"type": "Ready", "status": "False", "message": f"No GPU {HOSTILE}"}
    record.status = {"phase": "Pending", "ready": "0/2", "conditions": [condition]}
    return recorder


@pytest.fixture
async def page() -> AsyncIterator[Page]:
    async with TestServer(build_application(make_recorder(), lambda: NOW)) as server, open_browser() as found:
        await found.resize(*DESKTOP)
        await found.open(str(server.make_url("/")), until=READY)
        yield found


def read_axe() -> str:
    return Path(str(AXE)).read_text(encoding="utf-8") + "; 0"


async def get_text(page: Page, selector: str) -> str:
    return str(await page.evaluate(f"document.querySelector({json.dumps(selector)}).innerText"))


async def press_until(page: Page, wanted: str) -> list[str]:
    """Press Tab until an element has the focus. Return what had it."""
    seen: list[str] = []
    while not seen or seen[-1] != wanted:
        assert len(seen) < 40, seen
        await page.press("Tab")
        seen.append(await page.evaluate(FOCUSED))
    return seen


async def test_page_shows_the_deployment_and_its_decisions(page: Page) -> None:
    assert await get_text(page, "#name") == "team-a/chat"
    assert "of 300 ms" in await get_text(page, "#tiles")
    card = await get_text(page, "#cards li")
    for part in ("ChunksTooLarge", "2048 → 1024", "Lowered it again.", "ITL p95 from 90 ms to 50 ms", "kept: "):
        assert part in card
    assert (
        await page.evaluate("[...document.querySelectorAll('#marks button')].map((b) => b.textContent).join()") == "1,2"
    )
    assert await page.evaluate("document.querySelectorAll('figure .objective').length") > 0
    assert await page.evaluate("document.querySelectorAll('figure .over').length") > 0


async def test_page_requests_only_its_own_server(page: Page) -> None:
    await page.evaluate("load()")
    origin = await page.evaluate("location.origin")
    assert len(page.requested) >= 5
    assert [url for url in page.requested if not url.startswith(f"{origin}/")] == []


async def test_hostile_text_stays_text(page: Page) -> None:
    await page.evaluate("location.hash = '#/team-a/waiting'; load()")
    assert HOSTILE in await get_text(page, "#problem")
    assert await page.evaluate("document.querySelectorAll('img').length") == 0
    assert "hacked" not in await page.evaluate("document.title")


async def test_tab_order_follows_the_page(page: Page) -> None:
    seen = await press_until(page, "card")
    order = ["skip", "hour", "day", "filter", "team-a/chat", "team-a/waiting", "mark", "mark", "cursor", "card"]
    assert [name for name in seen if name not in ("list", "decisions")] == order


async def test_decision_is_selected_with_the_keyboard(page: Page) -> None:
    await press_until(page, "mark")
    await page.press("Enter")
    assert "Lowered it. " in await get_text(page, "#cards .selected")
    assert await page.evaluate(FOCUSED) == "mark"
    await page.evaluate("load()")
    assert await page.evaluate(FOCUSED) == "mark"
    await page.press("Escape")
    assert await page.evaluate("document.querySelectorAll('#cards .selected').length") == 0


async def test_arrow_keys_move_the_time_cursor(page: Page) -> None:
    readout = "[data-series=requests_per_second] output"
    before = await get_text(page, readout)
    await press_until(page, "cursor")
    for _ in range(20):
        await page.press("ArrowLeft")
    assert await get_text(page, readout) != before
    assert ":" in await page.evaluate("document.getElementById('cursor').getAttribute('aria-valuetext')")


async def test_day_range_has_coarse_points(page: Page) -> None:
    await page.evaluate("document.querySelector('[data-range=day]').click()")
    await page.evaluate("load()")
    assert "Each point covers 10 min" in await get_text(page, "#since")


@pytest.mark.parametrize("size", [PHONE, DESKTOP])
async def test_page_fits_the_width(page: Page, size: tuple[int, int]) -> None:
    await page.resize(*size)
    await page.wait(f"document.documentElement.scrollWidth <= {size[0]}")  # charts are drawn again
    controls = "[...document.querySelectorAll('button, a:not(.skip), input')]"
    small = f"{controls}.filter((e) => e.getBoundingClientRect().height < 18).map((e) => e.outerHTML.slice(0, 80))"
    assert await page.evaluate(small) == []
    outside = "[...document.querySelectorAll('figure svg, #marks button, #cards li')].filter((e) => "
    outside += "e.getBoundingClientRect().right > innerWidth || e.getBoundingClientRect().left < 0).length"
    await page.wait(f"{outside} === 0")


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_text_has_enough_contrast(page: Page, scheme: str) -> None:
    await page.set_scheme(scheme)
    for name in ("chat", "waiting"):
        await page.evaluate(f"location.hash = '#/team-a/{name}'; load()")
        await page.evaluate("document.querySelector('#marks button').click()")
        assert await page.evaluate(LOW_CONTRAST) == []


async def test_controls_and_images_have_names(page: Page) -> None:
    unnamed = """[...document.querySelectorAll("button, a, input, svg[role=img], section, nav")].filter((node) =>
        !(node.textContent.trim() && /^(BUTTON|A)$/.test(node.tagName)) && !node.getAttribute("aria-label") &&
        !node.getAttribute("aria-labelledby") && !(node.labels && node.labels.length)
    ).map((node) => node.outerHTML.slice(0, 80))"""
    assert await page.evaluate(unnamed) == []


async def test_lost_connection_is_shown(page: Page) -> None:
    await page.call(
        "Network.emulateNetworkConditions", offline=True, latency=0, downloadThroughput=0, uploadThroughput=0
    )
    await page.evaluate("load()")
    assert "No connection to the operator" in await get_text(page, "#updated")
    assert await get_text(page, "#name") == "team-a/chat"


@pytest.mark.skipif(AXE is None, reason="TRIMTAB_AXE_CORE is not set to the path of axe.min.js")
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [PHONE, DESKTOP])
async def test_axe_finds_no_violation(page: Page, scheme: str, size: tuple[int, int]) -> None:
    await page.set_scheme(scheme)
    await page.resize(*size)
    await page.evaluate(read_axe())
    run: Any = await page.evaluate(
        "axe.run().then((found) => found.violations.map((v) => [v.id, v.nodes.map((n) => n.html)]))"
    )
    assert run == []
