// Switches the light and the dark theme. The system's choice applies until the user selects one.

/** The font of drawings; --sans is that of the page. */
export const SANS = "system-ui, -apple-system, 'Segoe UI', sans-serif";

const FONT_SIZE = 15; // pixels of the page's font at which a drawing has its own size
const STORAGE_KEY = "qkv-theme";
const COLOURS = ["ink", "muted", "line", "card", "accent", "bar", "chart-ink", "chart-grid"];
const system = matchMedia("(prefers-color-scheme: dark)");

/** True if the page shows the dark theme. */
export function isDark() {
  const chosen = document.documentElement.dataset.theme;
  return chosen ? chosen === "dark" : system.matches;
}

/** Returns the pixels of the window for one pixel of a drawing, whose texts grow with the page's. */
export const readUnit = () =>
  parseFloat(getComputedStyle(document.documentElement).fontSize) / FONT_SIZE;

/** Returns the colours of the theme that drawings use, by name; of an element, if given. */
export function readColours(element = document.documentElement) {
  const style = getComputedStyle(element);
  return Object.fromEntries(
    COLOURS.map((name) => [name, style.getPropertyValue(`--${name}`).trim()]),
  );
}

/** Makes a button switch the theme; calls `onChange` after each change of the theme. */
export function listenToTheme(button, onChange) {
  const chosen = localStorage.getItem(STORAGE_KEY);
  if (chosen) document.documentElement.dataset.theme = chosen;
  const updateButton = () => {
    button.textContent = isDark() ? "Light" : "Dark";
    button.setAttribute("aria-label", `${isDark() ? "Light" : "Dark"} theme`);
  };
  const update = () => {
    updateButton();
    onChange();
  };
  button.addEventListener("click", () => {
    const theme = isDark() ? "light" : "dark";
    document.documentElement.dataset.theme = theme;
    localStorage.setItem(STORAGE_KEY, theme);
    update();
  });
  system.addEventListener("change", update);
  updateButton();
}
