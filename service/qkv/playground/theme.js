// Light and dark: the system's choice, until somebody makes another.

const STORAGE_KEY = "qkv-theme";
const system = matchMedia("(prefers-color-scheme: dark)");

/** Whether the page is dark now. */
export function isDark() {
  const chosen = document.documentElement.dataset.theme;
  return chosen ? chosen === "dark" : system.matches;
}

/** Has a button change the theme; `onChange` is called when it has become another. */
export function listenToTheme(button, onChange) {
  const chosen = localStorage.getItem(STORAGE_KEY);
  if (chosen) document.documentElement.dataset.theme = chosen;
  const updateButton = () => {
    button.textContent = isDark() ? "Light" : "Dark";
    button.setAttribute("aria-label", `Change to the ${isDark() ? "light" : "dark"} theme`);
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
