// Lets the search work when pages are opened as files. Browsers refuse to start a worker for such pages, so this
// class runs the worker's script in a hidden frame instead. The two exchange messages as a page and a worker do.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    #inner;
    #early = [];

    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.documentElement.append(frame);
      const inner = frame.contentWindow;
      const load = (address) => new Promise((resolve, reject) => {
        const script = inner.document.createElement("script");
        script.src = new URL(address, document.baseURI);
        script.onload = resolve;
        script.onerror = reject;
        inner.document.documentElement.append(script);
      });
      inner.postMessage = (data) => setTimeout(() => this.#tell(this, new MessageEvent("message", { data })));
      inner.importScripts = (...addresses) => addresses.reduce((done, one) => done.then(() => load(one)), Promise.resolve());
      load(url).then(() => {
        this.#inner = inner;
        this.#early.forEach((data) => this.postMessage(data));
      }, () => this.#tell(this, new Event("error")));
      this.terminate = () => frame.remove();
    }

    postMessage(data) {
      if (!this.#inner) this.#early.push(data);
      else setTimeout(() => this.#tell(this.#inner, new this.#inner.MessageEvent("message", { data })));
    }

    // dispatchEvent calls the listeners of an element or a window, and the handler of a window's property.
    #tell(target, event) {
      target.dispatchEvent(event);
      if (target === this) this[`on${event.type}`]?.(event);
    }
  };
}
