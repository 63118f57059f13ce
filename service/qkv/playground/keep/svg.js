// Paints an SVG on a canvas, and writes it as a file on white.
//
// The security policy of the page allows no picture from a blob: the shapes are painted one by one.

const NS = "http://www.w3.org/2000/svg";
const ALIGNMENTS = { start: "left", middle: "center", end: "right" };

/**
 * Paints the paths, circles and texts of an element.
 *
 * @param {CanvasRenderingContext2D} context
 * @param {SVGElement} element; each shape has its colours and its font as attributes
 * @param {(text: string) => string} resolve returns the colour that an attribute stands for
 */
export function paintSvg(context, element, resolve) {
  context.save();
  const matrix = element.transform?.baseVal.consolidate()?.matrix;
  if (matrix) context.transform(matrix.a, matrix.b, matrix.c, matrix.d, matrix.e, matrix.f);
  if (element.tagName === "text") paintText(context, element, resolve);
  else paintShape(context, element, resolve);
  for (const child of element.children) paintSvg(context, child, resolve);
  context.restore();
}

function paintShape(context, element, resolve) {
  const path = pathOf(element);
  if (!path) return;
  const [fill, stroke] = ["fill", "stroke"].map((name) => element.getAttribute(name) ?? "none");
  if (fill !== "none") {
    context.globalAlpha = Number(element.getAttribute("fill-opacity") ?? 1);
    context.fillStyle = resolve(fill);
    context.fill(path);
    context.globalAlpha = 1;
  }
  if (stroke === "none") return;
  context.strokeStyle = resolve(stroke);
  context.lineWidth = Number(element.getAttribute("stroke-width") ?? 1);
  context.stroke(path);
}

function pathOf(element) {
  const number = (name) => Number(element.getAttribute(name));
  if (element.tagName === "path") return new Path2D(element.getAttribute("d"));
  if (element.tagName !== "circle") return null;
  const path = new Path2D();
  path.arc(number("cx"), number("cy"), number("r"), 0, 2 * Math.PI);
  return path;
}

function paintText(context, element, resolve) {
  const attribute = (name, other) => element.getAttribute(name) ?? other;
  context.font = `${attribute("font-size", 12)}px ${attribute("font-family", "sans-serif")}`;
  context.textAlign = ALIGNMENTS[attribute("text-anchor", "start")];
  context.textBaseline = "alphabetic";
  context.fillStyle = resolve(attribute("fill", "black"));
  const text = [...element.childNodes].filter(({ nodeType }) => nodeType === Node.TEXT_NODE);
  context.fillText(text.map(({ data }) => data).join(""), attribute("x", 0), attribute("y", 0));
}

/**
 * Writes a drawing as the text of a file: on white, with its title above it.
 *
 * @param {SVGSVGElement} chart; it becomes a part of another element
 * @param {string} title
 * @param {{margin: number, titleHeight: number, font: string}} layout in pixels
 */
export function writeSvg(chart, title, { margin, titleHeight, font }) {
  const create = (name, attributes, ...children) => {
    const element = document.createElementNS(NS, name);
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    element.append(...children);
    return element;
  };
  const { width, height } = chart.viewBox.baseVal;
  const size = { width: width + 2 * margin, height: height + titleHeight + 2 * margin };
  const heading = { x: margin, y: margin + 12, "font-size": 15, "font-weight": 600 };
  for (const [key, value] of Object.entries({ x: margin, y: margin + titleHeight, width, height }))
    chart.setAttribute(key, value);
  const page = create(
    "svg",
    { ...size, viewBox: `0 0 ${size.width} ${size.height}` },
    create("rect", { ...size, fill: "#ffffff" }),
    create("text", { ...heading, "font-family": font, fill: "var(--ink, black)" }, title),
    chart,
  );
  return new XMLSerializer().serializeToString(page);
}
