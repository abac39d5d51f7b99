// The theme is the system's until the reader chooses; the choice is kept where the browser allows that for local files.
(() => {
  const root = document.documentElement;
  const system = matchMedia("(prefers-color-scheme: dark)");
  const store = {
    get: () => { try { return localStorage.getItem("attemper-theme"); } catch { return null; } },
    set: (theme) => { try { localStorage.setItem("attemper-theme", theme); } catch { return; } },
  };
  const apply = (theme) => {
    root.dataset.theme = theme;
    const button = document.getElementById("theme");
    if (button) button.textContent = theme === "dark" ? button.dataset.light : button.dataset.dark;
    dispatchEvent(new CustomEvent("themechange"));
  };
  apply(store.get() ?? (system.matches ? "dark" : "light"));
  system.addEventListener("change", () => { if (!store.get()) apply(system.matches ? "dark" : "light"); });
  addEventListener("DOMContentLoaded", () => {
    const button = document.getElementById("theme");
    button.hidden = false;
    button.textContent = root.dataset.theme === "dark" ? button.dataset.light : button.dataset.dark;
    button.addEventListener("click", () => {
      const theme = root.dataset.theme === "dark" ? "light" : "dark";
      store.set(theme);
      apply(theme);
    });
  });
})();
