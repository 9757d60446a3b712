({ least, others }) => {
  const problems = [];
  const root = document.documentElement;
  document.querySelectorAll("details").forEach((each) => (each.open = true));

  const wide = Math.max(root.scrollWidth, root.getBoundingClientRect().right);
  if (wide > innerWidth + 1) problems.push(`the page is ${Math.round(wide)} pixels wide on a screen of ${innerWidth}`);

  // Colours, as [red, green, blue, alpha] with alpha from 0 to 1.
  const parse = (text) => {
    const numbers = (text.match(/^rgba?\((.*)\)$/) ?? ["", "0 0 0 0"])[1].split(/[\s,/]+/).map(Number);
    return [...numbers.slice(0, 3), numbers[3] ?? 1];
  };
  const over = (top, below) => [0, 1, 2].map((i) => top[i] * top[3] + below[i] * (1 - top[3])).concat(1);
  const luminance = (colour) => {
    const [r, g, b] = colour.slice(0, 3).map((c) => (c / 255 <= 0.04045 ? c / 255 / 12.92 : ((c / 255 + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const contrast = (one, other) => {
    const [low, high] = [luminance(one), luminance(other)].sort((a, b) => a - b);
    return (high + 0.05) / (low + 0.05);
  };
  const ancestors = (element) => (element ? [element, ...ancestors(element.parentElement)] : []);
  const opacity = (element) => ancestors(element).reduce((all, each) => all * Number(getComputedStyle(each).opacity), 1);

  const white = [255, 255, 255, 1];
  const behindHtml = (element) =>
    ancestors(element).reverse().reduce((below, each) => over(parse(getComputedStyle(each).backgroundColor), below), white);
  // In a picture: the last shape before the text that lies under its middle.
  const shapes = [...document.querySelectorAll("svg rect, svg circle, rect, circle")];
  const behindSvg = (element, box) => {
    const [x, y] = [box.left + box.width / 2, box.top + box.height / 2];
    const under = shapes.filter((shape) => {
      const area = shape.getBoundingClientRect();
      const before = shape.compareDocumentPosition(element) & Node.DOCUMENT_POSITION_FOLLOWING;
      const inside = area.left <= x && x <= area.right && area.top <= y && y <= area.bottom;
      return before && inside && getComputedStyle(shape).fill !== "none";
    });
    return under.length ? over(parse(getComputedStyle(under.at(-1)).fill), white) : white;
  };

  const words = [];
  const walker = document.createTreeWalker(document.body ?? root, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement;
    const text = walker.currentNode.textContent.trim();
    if (!text || ["style", "script", "title"].includes(element.tagName.toLowerCase())) continue;
    if (!element.checkVisibility({ visibilityProperty: true, opacityProperty: true })) continue;
    const range = document.createRange();
    range.selectNodeContents(walker.currentNode);
    const boxes = [...range.getClientRects()].filter((box) => box.width && box.height);
    boxes.forEach((box) => words.push({ element, text: text.slice(0, 60), box }));
    const size = parseFloat(getComputedStyle(element).fontSize);
    if (boxes.length > 4 && Math.max(...boxes.map((box) => box.width)) < 3 * size) problems.push(`squeezed: ${text.slice(0, 60)}`);
  }

  for (const { element, text, box } of words) {
    if (others && element.closest(others)) continue;
    const style = getComputedStyle(element);
    const isSvg = element instanceof SVGElement;
    const behind = isSvg ? behindSvg(element, box) : behindHtml(element);
    const colour = parse(isSvg ? style.fill : style.color);
    const ratio = contrast(over([...colour.slice(0, 3), colour[3] * opacity(element)], behind), behind);
    if (ratio < least) problems.push(`contrast ${ratio.toFixed(2)}: ${text}`);

    // What is cut off at the edge of something that hides what goes over it; what can be scrolled to is there.
    const edge = ancestors(element).find((each) => getComputedStyle(each).overflowX !== "visible") ?? root;
    const area = edge === root ? { left: 0, right: innerWidth } : edge.getBoundingClientRect();
    const scrolls = edge !== root && ["auto", "scroll"].includes(getComputedStyle(edge).overflowX);
    if (!scrolls && (box.left < area.left - 1 || box.right > area.right + 1)) problems.push(`cut off: ${text}`);
  }

  const labels = words.filter(({ element }) => element instanceof SVGElement);
  labels.forEach(({ text, box }, index) =>
    labels.slice(index + 1).forEach((other) => {
      const wide = Math.min(box.right, other.box.right) - Math.max(box.left, other.box.left);
      const high = Math.min(box.bottom, other.box.bottom) - Math.max(box.top, other.box.top);
      if (wide > 1 && high > 3) problems.push(`${text} lies over ${other.text}`);
    }),
  );
  return [...new Set(problems)];
}
