// Opens every page of PAGES in a frame as wide as a screen and as a phone, and sends what is cut, outside or too small.

const WIDTHS = [1280, 390];
const SMALLEST_TEXT = 10; // pixels

function scrolls(element) {
  const { overflowX } = getComputedStyle(element);
  return (overflowX === "auto" || overflowX === "scroll") && element.scrollWidth > element.clientWidth;
}

function canBeScrolledTo(element) {
  for (let outer = element; outer; outer = outer.parentElement) if (scrolls(outer)) return true;
  return false;
}

function* listDefects(page) {
  const width = page.documentElement.clientWidth;
  if (page.scrollingElement.scrollWidth > width) yield ["the page scrolls sideways", page.body];
  for (const element of page.querySelectorAll(".md-content *:not(.md-code__nav *)")) {
    const box = element.getBoundingClientRect();
    if (!box.width || !box.height) continue;
    const style = getComputedStyle(element);
    const hides = style.overflowX === "hidden" || style.overflowX === "clip";
    if (hides && element.scrollWidth > element.clientWidth + 1) yield ["cut", element];
    if ((box.left < -1 || box.right > width + 1) && !canBeScrolledTo(element)) yield ["outside", element];
    if (element.localName === "img" && !element.naturalWidth) yield ["not loaded", element];
    const hasText = [...element.childNodes].some((node) => node.nodeType === Node.TEXT_NODE && node.data.trim());
    if (hasText && parseFloat(style.fontSize) < SMALLEST_TEXT) yield ["small text", element];
  }
}

async function measure() {
  const found = [];
  const frame = document.body.appendChild(document.createElement("iframe"));
  frame.height = 900;
  for (const width of WIDTHS) {
    frame.width = width;
    for (const path of PAGES) {
      await new Promise((loaded) => { frame.onload = loaded; frame.src = path; });
      for (const [defect, element] of listDefects(frame.contentDocument)) {
        const what = element.textContent.trim().replace(/\s+/g, " ").slice(0, 60) || element.getAttribute("src");
        found.push(`${path} at ${width}: ${defect}: <${element.localName} class="${element.className}"> ${what}`);
      }
    }
  }
  return found;
}

measure()
  .catch((error) => [String(error)])
  .then((found) => fetch("/found", { method: "POST", body: JSON.stringify(found) }));
