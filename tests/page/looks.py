"""What anybody needs of a page, measured in it: contrast, names, and that nothing sticks out."""

from playwright.sync_api import Page

# Texts whose contrast to what is behind them is under that of WCAG AA: [text, contrast].
FAINT = """() => {
  const parse = (color) => {
    const [r, g, b, a = 1] = color.match(/[\\d.]+/g).map(Number);
    return { rgb: [r, g, b], a };
  };
  const over = (top, below) => top.rgb.map((part, i) => part * top.a + below[i] * (1 - top.a));
  const ground = (element) => {
    if (!element) return [255, 255, 255];
    const color = parse(getComputedStyle(element).backgroundColor);
    return color.a === 1 ? color.rgb : over(color, ground(element.parentElement));
  };
  const light = (rgb) => {
    const [r, g, b] = rgb.map((part) => {
      const share = part / 255;
      return share <= 0.04045 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4;
    });
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const faint = [];
  for (const element of document.body.querySelectorAll("*")) {
    const own = [...element.childNodes].filter((node) => node.nodeType === Node.TEXT_NODE);
    const text = own.map((node) => node.data).join("").trim();
    if (!text || !element.checkVisibility({ visibilityProperty: true }) || element.disabled) continue;
    const style = getComputedStyle(element);
    const behind = ground(element);
    const [a, b] = [light(over(parse(style.color), behind)), light(behind)].sort((x, y) => y - x);
    const large = parseFloat(style.fontSize) >= 24;
    const contrast = (a + 0.05) / (b + 0.05);
    if (contrast < (large ? 3 : 4.5)) faint.push([text, contrast]);
  }
  return faint;
}"""

# Things to use that say nothing of what they are for.
NAMELESS = """() => [...document.querySelectorAll("a, button, input, textarea, summary, [role=img], .bar")]
  .filter((element) => element.checkVisibility())
  .filter((element) => !element.ariaLabel && !element.labels?.length && !element.textContent.trim())
  .map((element) => element.outerHTML)"""

# What sticks out of the screen at its right edge, apart from what can be scrolled.
WIDE = """() => [document.documentElement, ...document.querySelectorAll("main > section, .panel, .slot")]
  .filter((element) => element.checkVisibility() && element.scrollWidth > element.clientWidth + 1)
  .map((element) => element.id || element.className || element.tagName)"""


def check(page: Page) -> None:
    """Assert all of this of what the page shows now."""
    assert page.evaluate(FAINT) == []
    assert page.evaluate(NAMELESS) == []
    assert page.evaluate(WIDE) == []
