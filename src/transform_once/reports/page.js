"use strict";
// A film shows the frame that its slider stands on; without this script it stays at the first.
for (const film of document.querySelectorAll(".film")) {
  const frames = film.querySelectorAll(".frame");
  const slider = film.querySelector("input");
  const output = film.querySelector("output");
  const show = () => {
    frames.forEach((frame, number) => { frame.hidden = number !== slider.valueAsNumber; });
    output.value = frames[slider.valueAsNumber].dataset.caption;
    slider.setAttribute("aria-valuetext", output.value);
  };
  slider.addEventListener("input", show);
  show();
}
