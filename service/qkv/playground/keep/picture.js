// Draws a figure for print: its title and its drawing, on white, in the colours of the light theme.

import { h } from "../dom.js";
import { readColours, SANS } from "../theme.js";
import { paintSvg, writeSvg } from "./svg.js";
import { layOutTable } from "./table_picture.js";

const WIDTH = 640; // of a drawing; 680 pixels with the margins are 17 cm of paper
const MARGIN = 20;
const TITLE_HEIGHT = 34;
const SCALE = 3; // dots of the picture for each pixel: 300 dots per inch
const TITLE_FONT = `600 15px ${SANS}`;

// PNG, section 11.3.4.3: length, pHYs, 11811 dots per metre in both directions, checksum
// prettier-ignore
const DENSITY = [
  0, 0, 0, 9, 0x70, 0x48, 0x59, 0x73, 0, 0, 0x2e, 0x23, 0, 0, 0x2e, 0x23, 1, 0x78, 0xa5, 0x3f, 0x76,
];
const DENSITY_AT = 33; // after the signature and the header

/** Returns a figure as a PNG, which other programs show in its size on paper. */
export async function drawPicture(figure) {
  const canvas = h("canvas");
  const context = canvas.getContext("2d");
  const { width = WIDTH, height, draw } = layOut(figure, context);
  context.font = TITLE_FONT;
  const titleWidth = Math.min(Math.ceil(context.measureText(figure.title).width), WIDTH);
  const fullWidth = Math.max(width, titleWidth);
  canvas.width = SCALE * (fullWidth + 2 * MARGIN);
  canvas.height = Math.ceil(SCALE * (height + TITLE_HEIGHT + 2 * MARGIN));
  context.fillStyle = "#ffffff";
  context.fillRect(0, 0, canvas.width, canvas.height);
  context.scale(SCALE, SCALE);
  context.translate(MARGIN, MARGIN);
  const colours = paperColours();
  context.fillStyle = colours.ink;
  context.font = TITLE_FONT;
  context.textBaseline = "top";
  context.fillText(figure.title, 0, 0, fullWidth);
  context.translate(0, TITLE_HEIGHT);
  draw(colours);
  return toPng(canvas);
}

async function toPng(canvas) {
  const png = await new Promise((resolve) => canvas.toBlob(resolve, "image/png"));
  return new Blob([png.slice(0, DENSITY_AT), new Uint8Array(DENSITY), png.slice(DENSITY_AT)]);
}

/** Returns the drawing of a figure as an SVG on white, with its title. */
export function drawSvg({ title, svg }) {
  const text = writeSvg(svg(), title, { margin: MARGIN, titleHeight: TITLE_HEIGHT, font: SANS });
  return new Blob([resolveColours(text, paperColours())]);
}

/** Lays out the drawing of a figure: its own, its SVG, or its table. */
function layOut({ picture, svg, table, shownTable = table }, context) {
  if (picture) return picture(context, WIDTH);
  if (!svg) return layOutTable(context, shownTable);
  const chart = svg();
  const { width, height } = chart.viewBox.baseVal;
  const draw = (colours) => paintSvg(context, chart, (text) => resolveColours(text, colours));
  return { width, height, draw };
}

/** Returns the colours of the light theme, by name. */
function paperColours() {
  const paper = h("div", { class: "paper", hidden: true });
  document.body.append(paper);
  const colours = readColours(paper);
  paper.remove();
  return colours;
}

/** Replaces the variables of the theme by their colours: other programs do not know them. */
const resolveColours = (text, colours) =>
  text.replace(/var\(--([\w-]+), ([^)]*)\)/g, (_, name, other) => colours[name] || other);
