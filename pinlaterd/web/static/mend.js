// Has the commands say the numbers that the form says.
for (const input of document.querySelectorAll(".mend [type=number]")) {
  const show = () => {
    for (const place of document.querySelectorAll(`[data-of=${input.name}]`)) place.textContent = input.value || input.defaultValue;
  };
  input.addEventListener("input", show);
  show();
}
