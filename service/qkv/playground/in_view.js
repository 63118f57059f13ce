// Lets a part of the page load its content only while it is in view.

const NEAR = { rootMargin: "200px" }; // so near the window, the user sees it next

/**
 * Calls back when an element comes into view; in a folded section it never does.
 *
 * @param {HTMLElement} element
 * @param {() => void} load
 * @returns {() => void} calls `load` if the element is in view
 */
export function listenInView(element, load) {
  let isInView = false;
  const loadInView = () => {
    if (isInView) load();
  };
  new IntersectionObserver((entries) => {
    isInView = entries.at(-1).isIntersecting;
    loadInView();
  }, NEAR).observe(element);
  return loadInView;
}
