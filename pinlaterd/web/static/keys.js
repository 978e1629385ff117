// The keys of all pages.
const find = document.getElementById("find");

document.addEventListener("keydown", (event) => {
  if (document.documentElement.dataset.keys === "off") return;
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.target.closest("input, textarea, select")) return;
  if (event.key === "/") {
    event.preventDefault();
    find.focus();
  }
});
