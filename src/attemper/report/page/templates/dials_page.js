// The page of the dials alone says that it is ready.
requestAnimationFrame(() => setTimeout(() => { document.documentElement.dataset.ready = performance.now().toFixed(0); }));
