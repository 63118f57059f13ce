// The menu that keeps a figure: as a picture, as numbers in a file, or as a table in the clipboard.
//
// A figure is {title, table, shownTable, picture, svg, tensors}, all optional but title and table:
//   title: above its picture, and in the names of its files
//   table: {headings, rows}: texts, and lists of texts and numbers; null for an empty cell
//   shownTable: the part of it that the page shows, for the picture and the clipboard
//   picture: (context, width) => {height, draw}, and draw(colours) draws it at the origin
//   svg: () => an SVG element with a viewBox
//   tensors: {dtype, shape, data} by name

import { formatSafetensors } from "../data/safetensors.js";
import { findById, h, placeBeside, setText } from "../dom.js";
import { drawPicture, drawSvg } from "./picture.js";
import { copyTable, toCsv } from "./table_text.js";

const COPIED_MS = 1500; // how long the button says so

const FILES = [
  { name: "PNG", suffix: "png", about: "picture for print", create: drawPicture },
  { name: "SVG", suffix: "svg", about: "drawing", create: drawSvg, needs: "svg" },
  {
    name: "CSV",
    suffix: "csv",
    about: "all numbers",
    create: ({ table }) => new Blob([toCsv(table)]),
  },
  {
    name: "safetensors",
    suffix: "safetensors",
    about: "inputs and outputs",
    create: ({ tensors }) => formatSafetensors(tensors),
    needs: "tensors",
  },
];

/**
 * Creates the button of the menu, with its menu.
 *
 * @param {string} what the figure, for screen readers: Save `what`
 * @param {() => Object} describe returns the figure; called when the user opens the menu
 * @returns {HTMLElement}
 */
export function createSaveMenu(what, describe) {
  const label = `Save ${what}`;
  const button = h("button", { type: "button", class: "quiet", "aria-label": label }, "Save");
  const menu = h("div", { class: "menu", popover: "auto", role: "group", "aria-label": label });
  button.popoverTargetElement = menu;

  const report = (text, shown) => {
    setText(findById("announcements"), text);
    button.textContent = shown;
    setTimeout(() => (button.textContent = "Save"), COPIED_MS);
  };
  const createItem = (text, about, keep) => {
    const click = async () => {
      menu.hidePopover();
      await keep();
    };
    return h("button", { type: "button", click }, text, h("span", { class: "hint" }, about));
  };
  const fill = () => {
    const figure = describe();
    const available = FILES.filter(({ needs }) => !needs || figure[needs]);
    const items = available.map(({ name, suffix, about, create }) =>
      createItem(name, about, async () => {
        const fileName = `${toFileName(figure.title)}.${suffix}`;
        saveFile(new File([await create(figure)], fileName));
        report(`Saved ${fileName}`, "Saved");
      }),
    );
    const copy = createItem("Copy table", "for a document", async () => {
      const isCopied = await copyTable(figure.shownTable ?? figure.table);
      report(isCopied ? "Copied" : "The browser does not allow it", isCopied ? "Copied" : "Failed");
    });
    menu.replaceChildren(...items, copy);
  };
  menu.addEventListener("beforetoggle", ({ newState }) => newState === "open" && fill());
  const place = () => placeBeside(menu, button);
  menu.addEventListener("toggle", ({ newState }) => {
    const options = { capture: true, passive: true };
    if (newState !== "open") return document.removeEventListener("scroll", place, options);
    document.addEventListener("scroll", place, options);
    place();
    menu.firstElementChild.focus();
  });
  return h("span", { class: "save" }, button, menu);
}

/** Saves a file in the user's folder of downloads. */
export function saveFile(file) {
  const url = URL.createObjectURL(file);
  h("a", { href: url, download: file.name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 10_000); // the download has begun by then
}

/** Returns a title as the name of a file: weights-of-softmax-head-2. */
const toFileName = (title) =>
  title
    .toLowerCase()
    .replace(/[^\p{L}\p{N}._-]+/gu, "-")
    .replace(/^[-.]+|-+$/g, "");
