// What the theme leaves to screen readers and keyboards: names of its search and of its copy buttons, and focus for
// what scrolls sideways.
function name() {
  document.querySelector(".md-search")?.setAttribute("aria-label", "Search");
  document.querySelectorAll(".md-code__nav").forEach((nav, number) => nav.setAttribute("aria-label", `Code ${number + 1}`));
  for (const box of document.querySelectorAll("pre > code, .md-typeset__scrollwrap")) box.tabIndex = 0;
}
document.addEventListener("DOMContentLoaded", () => {
  name();
  new MutationObserver(name).observe(document.body, { childList: true, subtree: true });
});
