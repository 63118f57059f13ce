// Light and dark: the system's choice, until somebody makes another.

const NAME = "qkv-theme";
const system = matchMedia("(prefers-color-scheme: dark)");

/** Whether the page is dark now. */
export function isDark() {
  const chosen = document.documentElement.dataset.theme;
  return chosen ? chosen === "dark" : system.matches;
}

/** Has a button change the theme; `changed` is called when it has become another. */
export function themed(button, changed) {
  const chosen = localStorage.getItem(NAME);
  if (chosen) document.documentElement.dataset.theme = chosen;
  const shown = () => {
    button.textContent = isDark() ? "Light" : "Dark";
    button.setAttribute("aria-label", `Change to the ${isDark() ? "light" : "dark"} theme`);
  };
  const update = () => {
    shown();
    changed();
  };
  button.addEventListener("click", () => {
    const theme = isDark() ? "light" : "dark";
    document.documentElement.dataset.theme = theme;
    localStorage.setItem(NAME, theme);
    update();
  });
  system.addEventListener("change", update);
  shown();
}
