// Helpers for elements of the page.

export const at = (id) => document.getElementById(id);

// A new element with properties ("class" and names with "-" are attributes) and children.
export function make(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name === "class" || name.includes("-")) element.setAttribute(name, value);
    else element[name] = value;
  }
  element.append(...children);
  return element;
}

// Tells a screen reader `text`, once.
export function announce(text) {
  at("status").textContent = text;
}

// Lets a form run `task(signal)`. While it runs, the form's button stops it; so does `restart`.
export function onRun(form, task) {
  const button = form.querySelector(".run");
  const label = button.textContent;
  let controller = null;
  const set = (value) => {
    controller = value;
    button.textContent = value ? "Stop" : label;
  };
  form.addEventListener("stop", () => {
    controller?.abort();
    set(null);
  });
  form.onsubmit = async (submit) => {
    submit.preventDefault();
    if (controller) return controller.abort();
    const own = new AbortController();
    set(own);
    try {
      await task(own.signal);
    } finally {
      if (controller === own) set(null);
    }
  };
}

export const stop = (form) => form.dispatchEvent(new Event("stop"));

// Runs the task of a form anew.
export function restart(form) {
  stop(form);
  form.requestSubmit();
}

// Calls `task` once no further call has come for `milliseconds`.
export function debounced(task, milliseconds) {
  let timer = 0;
  return () => {
    clearTimeout(timer);
    timer = setTimeout(task, milliseconds);
  };
}
