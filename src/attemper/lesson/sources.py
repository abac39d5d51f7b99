"""What the lesson cites: papers by the name under which the texts call them."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Source:
    """A paper, by its authors and year and its number on arXiv."""

    authors: str
    arxiv: str

    @property
    def cited(self) -> str:
        """A Markdown link."""
        label = f"{self.authors}, arXiv {self.arxiv}" if self.authors else f"arXiv {self.arxiv}"
        return f"[{label}](https://arxiv.org/abs/{self.arxiv})"


SOURCES = {
    "attention": Source("Vaswani et al. 2017", "1706.03762"),
    "bahdanau": Source("Bahdanau, Cho, Bengio 2014", "1409.0473"),
    "online-softmax": Source("Milakov, Gimelshein 2018", "1805.02867"),
    "small-proxies": Source("Wortsman et al. 2023", "2309.14322"),
    "vit-22b": Source("Dehghani et al. 2023", "2302.05442"),
    "sigma-reparam": Source("Zhai et al. 2023", "2303.06296"),
    "kimi-k2": Source("Kimi K2 2025", "2507.20534"),
    "ssmax": Source("Nakanishi 2025", "2501.19399"),
    "critical-scaling": Source("Chen et al. 2025", "2510.05554"),
    "yarn": Source("Peng et al. 2023", "2309.00071"),
    "rope": Source("Su et al. 2021", "2104.09864"),
    "t5": Source("Raffel et al. 2019", "1910.10683"),
    "mup": Source("Yang et al. 2022", "2203.03466"),
    "swin-v2": Source("Liu et al. 2022", "2111.09883"),
    "qk-norm": Source("Henry et al. 2020", "2010.04245"),
    "dot-product-alternatives": Source("", "2311.09406"),
}
