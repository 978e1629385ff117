// Buttons that copy: shown only where the browser lets a page write to the clipboard.
const SHOWN_MS = 2000;

for (const button of document.querySelectorAll("button[data-copy]")) {
  if (!navigator.clipboard) break;
  const text = button.dataset.copy || location.href;
  const label = button.textContent;
  button.hidden = false;
  button.addEventListener("click", async () => {
    await navigator.clipboard.writeText(text);
    button.textContent = "Copied";
    setTimeout(() => { button.textContent = label; }, SHOWN_MS);
  });
}
