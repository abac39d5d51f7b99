"""What the lesson cites: papers and pages by the name under which the texts call them."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Source:
    """A paper, by its authors and year and its number on arXiv, or a page, by what it is and where on GitHub."""

    name: str
    arxiv: str = ""
    github: str = ""

    @property
    def address(self) -> str:
        """Where it is read."""
        return f"https://github.com/{self.github}" if self.github else f"https://arxiv.org/abs/{self.arxiv}"

    @property
    def cited(self) -> str:
        """A Markdown link."""
        return f"[{self.name}, arXiv {self.arxiv}]({self.address})" if self.arxiv else f"[{self.name}]({self.address})"


SOURCES = {
    "attention": Source("Vaswani et al. 2017", "1706.03762"),
    "bahdanau": Source("Bahdanau, Cho, Bengio 2014", "1409.0473"),
    "online-softmax": Source("Milakov, Gimelshein 2018", "1805.02867"),
    "flash-attention": Source("Dao et al. 2022", "2205.14135"),
    "small-proxies": Source("Wortsman et al. 2023", "2309.14322"),
    "vit-22b": Source("Dehghani et al. 2023", "2302.05442"),
    "sigma-reparam": Source("Zhai et al. 2023", "2303.06296"),
    "kimi-k2": Source("Kimi K2 2025", "2507.20534"),
    "ssmax": Source("Nakanishi 2025", "2501.19399"),
    "critical-scaling": Source("Chen et al. 2025", "2510.05554"),
    "yarn": Source("Peng et al. 2023", "2309.00071"),
    "rope": Source("Su et al. 2021", "2104.09864"),
    "t5": Source("Raffel et al. 2019", "1910.10683"),
    "t5-code": Source(
        "transformers, modeling_t5.py",
        github="huggingface/transformers/blob/main/src/transformers/models/t5/modeling_t5.py",
    ),
    "sd-products": Source("showlab/Tune-A-Video, issue 103", github="showlab/Tune-A-Video/issues/103"),
    "mup": Source("Yang et al. 2022", "2203.03466"),
    "swin-v2": Source("Liu et al. 2021", "2111.09883"),
    "qk-norm": Source("Henry et al. 2020", "2010.04245"),
    "dot-product-alternatives": Source("Bernhard 2023", "2311.09406"),
}
