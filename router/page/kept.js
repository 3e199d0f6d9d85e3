// A value that the browser keeps: area is "localStorage" (for good) or "sessionStorage" (for this tab).
//
// A browser that blocks storage throws when the area is read. Then the value lasts as long as the page.

export class Kept {
  constructor(area, key) {
    this.area = area;
    this.key = key;
    this.value = "";
    this.reach((storage) => (this.value = storage.getItem(key) ?? ""));
  }

  set(value) {
    this.value = value;
    this.reach((storage) => (value ? storage.setItem(this.key, value) : storage.removeItem(this.key)));
  }

  reach(use) {
    try {
      use(window[this.area]);
    } catch (error) {
      if (!(error instanceof DOMException)) throw error;
    }
  }
}
