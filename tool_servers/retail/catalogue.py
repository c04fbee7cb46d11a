"""Finding products and their stock. Reads only."""

from sqlalchemy import RowMapping
from sqlalchemy.ext.asyncio import AsyncConnection

from megamcp.sdk import ToolError
from tool_servers.retail.lookups import fetch_all, fetch_one, options_of, require_variant
from tool_servers.retail.models import Category, Product, ProductSummary, Stock, Variant
from tool_servers.retail.references import Ref, dollars, to_cents


async def list_categories(db: AsyncConnection) -> list[Category]:
    """List the store's categories with their department and number of active products."""
    found = await fetch_all(
        db,
        "select c.name, d.name as department, count(p.id) as products from categories c"
        " join categories d on d.id = c.parent_id"
        " left join products p on p.category_id = c.id and p.status = 'active'"
        " group by c.name, d.name order by d.name, c.name",
    )
    return [Category(name=r["name"], department=r["department"], products=r["products"]) for r in found]


async def search_products(
    db: AsyncConnection,
    query: str | None = None,
    category: str | None = None,
    max_price: float | None = None,
    in_stock_only: bool = False,
    limit: int = 10,
) -> list[ProductSummary]:
    """Search active products. Every word of the query must occur in name, brand, category or description.

    An empty list means that nothing matches: use fewer words or list_categories.

    Args:
        query: Words such as "rain jacket"; leave out to list a category.
        category: A category or department name from list_categories.
        max_price: Only products with a variant at or below this price in US dollars.
        in_stock_only: Only products with units that can be sold now.
        limit: How many at most, 1 to 50.
    """
    if category is not None:
        known = await fetch_one(
            db, "select id from categories where lower(name) = :name", name=category.strip().lower()
        )
        if known is None:
            raise ToolError(
                "category_not_found",
                f"There is no category {category!r}. Use list_categories to see the names.",
            )
    found = await fetch_all(
        db,
        "select p.id, p.name, p.brand, p.description, c.name as category, d.name as department,"
        " min(v.price_cents) as low, max(v.price_cents) as high, sum(v.available) as available"
        " from products p join categories c on c.id = p.category_id join categories d on d.id = c.parent_id"
        " join variants v on v.product_id = p.id where p.status = 'active'"
        " group by p.id, p.name, p.brand, p.description, c.name, d.name order by p.name",
    )
    words = (query or "").lower().split()
    wanted = category.strip().lower() if category is not None else None
    ceiling = to_cents(max_price) if max_price is not None else None

    def matches(row: RowMapping) -> bool:
        hay = " ".join((row["name"], row["brand"], row["category"], row["description"])).lower()
        shelf = wanted in (None, row["category"].lower(), row["department"].lower())
        affordable = ceiling is None or row["low"] <= ceiling
        return shelf and affordable and all(w in hay for w in words) and (row["available"] > 0 or not in_stock_only)

    # Hits in the name first; sorting is stable, so names stay in order within both parts.
    hits = sorted(filter(matches, found), key=lambda row: not all(word in row["name"].lower() for word in words))
    return [
        ProductSummary(
            product_id=Ref.PRODUCT.show(row["id"]),
            name=row["name"],
            brand=row["brand"],
            category=row["category"],
            price_from=dollars(row["low"]),
            price_to=dollars(row["high"]),
            available=row["available"],
        )
        for row in hits[: max(1, min(limit, 50))]
    ]


async def get_product(db: AsyncConnection, product_id: str) -> Product:
    """Show a product with all its variants, their SKUs, prices and stock.

    Args:
        product_id: For example P5001 (from search_products or an order).
    """
    row = await fetch_one(
        db,
        "select p.*, c.name as category from products p join categories c on c.id = p.category_id where p.id = :id",
        id=Ref.PRODUCT.parse(product_id),
    )
    if row is None:
        raise ToolError("product_not_found", f"There is no product {product_id}. Use search_products to find one.")
    variants = await fetch_all(db, "select * from variants where product_id = :id order by id", id=row["id"])
    return Product(
        product_id=Ref.PRODUCT.show(row["id"]),
        name=row["name"],
        brand=row["brand"],
        category=row["category"],
        description=row["description"],
        status=row["status"],
        final_sale=row["final_sale"],
        variants=[
            Variant(
                sku=variant["sku"],
                options=options_of(variant["options"]),
                price=dollars(variant["price_cents"]),
                available=variant["available"],
                restock_on=variant["restock_on"],
            )
            for variant in variants
        ],
    )


async def check_stock(db: AsyncConnection, sku: str) -> Stock:
    """Show price and available units of one SKU, and when it is expected back if it is sold out.

    Args:
        sku: A SKU from get_product or get_order.
    """
    row = await require_variant(db, sku)
    return Stock(
        sku=row["sku"],
        product_id=Ref.PRODUCT.show(row["product_id"]),
        name=row["name"],
        options=options_of(row["options"]),
        price=dollars(row["price_cents"]),
        status=row["status"],
        available=row["available"],
        restock_on=row["restock_on"],
    )
